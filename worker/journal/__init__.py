"""Event log of a task: typed events, the agent state that they reduce to, snapshots and handoff documents.

The package knows no handlers and no runtime: it reads and computes, and the run writes.

    event.py            base class of events, registry of Perdure's types
    run_events.py       events of a run: start, steps, waits, messages, end
    archive.py          closed steps and old messages that leave a state
    compaction.py       compaction of a state by an operator
    correction.py       correction of a state by a person
    agent_events.py     events of an agent's work: plan, decisions, tools, conversation, state
    chat.py             messages of a conversation
    parsing.py          log entries to events; application event types
    event_redaction.py  secrets out of events
    state.py            AgentState
    reducer.py          state = reduce(events), pure
    json_patch.py       diff and apply JSON Patches (RFC 6902)
    snapshot.py         stored form of a state
    step_record.py      stored form of a step record
    history.py          the state at any event; check of a snapshot against the log
    forks.py            a new task from a point in another one's log
    quoting.py          foreign text as one line or one block, for prompts and Markdown
    resumption.py       summary of what a resumed run continues from
    handoff/            handoff documents

Event types, field names and stored forms are durable data: workers of two versions share one log. Give a new field a
default, raise the version of a type whose meaning changes, and never rename either.
"""

from . import agent_events, run_events
from .archive import (
    ARCHIVED,
    Removed,
    archived_field,
    archived_keys,
    archived_since,
    archived_steps,
    read_archived_step,
    remove_oldest,
    retire_steps,
    retired_fields,
    retired_keys,
)
from .chat import Message, Role, ToolCall
from .compaction import COMPACTION, TOO_LARGE, compact_state
from .correction import CannotCorrect, corrected
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
from .history import PastState, check_state, gap_before, read_snapshot, state_at
from .json_patch import BadPatch, Patch, apply, diff
from .parsing import Foreign, Unreadable, parse_event, register_event
from .reducer import empty_state, reduce
from .resumption import After, Resumption
from .snapshot import BLOB, SNAPSHOT, StoredState, decode_snapshot, encode_snapshot
from .state import (
    KEPT,
    AgentState,
    Archive,
    ArchivedSteps,
    Artifact,
    Commitment,
    Decision,
    Discovery,
    Ephemeral,
    PlanStep,
    Question,
    StepStatus,
    WaitingFor,
)
from .step_record import MISREAD, QUESTIONS, UNSAVED, VERSION, StepRecord

__all__ = [
    "ARCHIVED",
    "BLOB",
    "COMPACTION",
    "HANDOFF",
    "HANDOFF_TOKENS",
    "KEPT",
    "MISREAD",
    "QUESTIONS",
    "SNAPSHOT",
    "TOO_LARGE",
    "UNSAVED",
    "VERSION",
    "After",
    "AgentState",
    "Archive",
    "ArchivedSteps",
    "Artifact",
    "BadEdit",
    "BadPatch",
    "CannotCorrect",
    "Commitment",
    "Decision",
    "Discovery",
    "Ephemeral",
    "Event",
    "Foreign",
    "Handoff",
    "Message",
    "PastState",
    "Patch",
    "PlanStep",
    "Point",
    "Question",
    "Removed",
    "Resumption",
    "Role",
    "StepRecord",
    "StepStatus",
    "StoredState",
    "ToolCall",
    "Unreadable",
    "WaitingFor",
    "agent_events",
    "apply",
    "archived_field",
    "archived_keys",
    "archived_since",
    "archived_steps",
    "build_handoff",
    "check_state",
    "compact_state",
    "corrected",
    "decode_snapshot",
    "diff",
    "empty_state",
    "encode_snapshot",
    "estimated_tokens",
    "fitted",
    "fitted_text",
    "fork",
    "gap_before",
    "handoff_of",
    "parse_event",
    "read_archived_step",
    "read_snapshot",
    "redacted",
    "reduce",
    "register_event",
    "remove_oldest",
    "retire_steps",
    "retired_fields",
    "retired_keys",
    "run_events",
    "state_after",
    "state_at",
]
