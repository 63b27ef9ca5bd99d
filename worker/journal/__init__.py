"""What happened to a task, typed, and the state that follows from it. Knows no handlers and no runtime."""

from . import events
from .blobs import BLOB
from .delta import BadPatch, Patch, apply, diff
from .events import Event
from .forking import BadEdit, Fork, Point, fork
from .history import Past, check_state, read_snapshot, state_at, walk_states
from .messages import Message, Role, ToolCall
from .reading import Unreadable, parse_event, register_event
from .redacting import redacted
from .reducer import KEPT, empty_state, reduce
from .snapshot import SNAPSHOT, StoredState, decode_snapshot, encode_snapshot
from .state import AgentState, Artifact, Decision, Discovery, Ephemeral, PlanStep, StepStatus, WaitingFor

__all__ = [
    "BLOB",
    "KEPT",
    "SNAPSHOT",
    "AgentState",
    "Artifact",
    "BadEdit",
    "BadPatch",
    "Decision",
    "Discovery",
    "Ephemeral",
    "Event",
    "Fork",
    "Message",
    "Past",
    "Patch",
    "PlanStep",
    "Point",
    "Role",
    "StepStatus",
    "StoredState",
    "ToolCall",
    "Unreadable",
    "WaitingFor",
    "apply",
    "check_state",
    "decode_snapshot",
    "diff",
    "empty_state",
    "encode_snapshot",
    "events",
    "fork",
    "parse_event",
    "read_snapshot",
    "redacted",
    "reduce",
    "register_event",
    "state_at",
    "walk_states",
]
