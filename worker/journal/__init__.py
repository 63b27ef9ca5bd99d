"""What happened to a task, typed, and the state that follows from it. Knows no handlers and no runtime."""

from . import agent_events, run_events
from .chat import Message, Role, ToolCall
from .event import Event
from .event_redaction import redacted
from .forks import BadEdit, Point, fork
from .handoff import (
    HANDOFF,
    HANDOFF_TOKENS,
    Handoff,
    build_handoff,
    estimated_tokens,
    fitted,
    fitted_text,
    handoff_of,
    state_after,
)
from .history import Past, check_state, read_snapshot, state_at
from .json_patch import BadPatch, Patch, apply, diff
from .parsing import Foreign, Unreadable, parse_event, register_event
from .reducer import KEPT, empty_state, reduce
from .resumption import After, Resumption
from .snapshot import BLOB, SNAPSHOT, StoredState, decode_snapshot, encode_snapshot
from .state import AgentState, Artifact, Decision, Discovery, Ephemeral, PlanStep, StepStatus, WaitingFor

__all__ = [
    "BLOB",
    "HANDOFF",
    "HANDOFF_TOKENS",
    "KEPT",
    "SNAPSHOT",
    "After",
    "AgentState",
    "Artifact",
    "BadEdit",
    "BadPatch",
    "Decision",
    "Discovery",
    "Ephemeral",
    "Event",
    "Foreign",
    "Handoff",
    "Message",
    "Past",
    "Patch",
    "PlanStep",
    "Point",
    "Resumption",
    "Role",
    "StepStatus",
    "StoredState",
    "ToolCall",
    "Unreadable",
    "WaitingFor",
    "agent_events",
    "apply",
    "build_handoff",
    "check_state",
    "decode_snapshot",
    "diff",
    "empty_state",
    "encode_snapshot",
    "estimated_tokens",
    "fitted",
    "fitted_text",
    "fork",
    "handoff_of",
    "parse_event",
    "read_snapshot",
    "redacted",
    "reduce",
    "register_event",
    "run_events",
    "state_after",
    "state_at",
]
