"""What happened to a task, typed, and the state that follows from it. Knows no handlers and no runtime."""

from . import events
from .blobs import BLOB
from .delta import BadPatch, Patch, apply, diff
from .events import Event
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
    "BadPatch",
    "Decision",
    "Discovery",
    "Ephemeral",
    "Event",
    "Message",
    "Patch",
    "PlanStep",
    "Role",
    "StepStatus",
    "StoredState",
    "ToolCall",
    "Unreadable",
    "WaitingFor",
    "apply",
    "decode_snapshot",
    "diff",
    "empty_state",
    "encode_snapshot",
    "events",
    "parse_event",
    "redacted",
    "reduce",
    "register_event",
]
