"""What happened to a task, typed, and the state that follows from it. Knows no handlers and no runtime."""

from . import events
from .delta import BadPatch, Patch, apply, diff
from .events import Event
from .messages import Message, Role, ToolCall
from .reading import Unreadable, parse_event, register_event
from .redacting import redacted
from .reducer import KEPT, empty_state, reduce
from .state import AgentState, Artifact, Decision, Discovery, PlanStep, StepStatus, WaitingFor

__all__ = [
    "KEPT",
    "AgentState",
    "Artifact",
    "BadPatch",
    "Decision",
    "Discovery",
    "Event",
    "Message",
    "Patch",
    "PlanStep",
    "Role",
    "StepStatus",
    "ToolCall",
    "Unreadable",
    "WaitingFor",
    "apply",
    "diff",
    "empty_state",
    "events",
    "parse_event",
    "redacted",
    "reduce",
    "register_event",
]
