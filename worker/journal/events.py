"""What can happen to a task, type by type: the entries of its event log.

Each type is a model with a version of its own. A reader takes older versions, and every field that came later has a
default; what an event of a later version or an unknown type, or with broken data, is read as: see `reading.py`.

Schemas are built when they are first used: a worker that tells of nothing does not wait for them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from .chat import Message

__all__ = [
    "TYPES",
    "ArtifactSaved",
    "AttemptFailed",
    "Buried",
    "Changed",
    "Cleared",
    "Compacted",
    "CrashBackoff",
    "Crashed",
    "Decided",
    "Discovered",
    "Event",
    "Finished",
    "Forked",
    "HandedOff",
    "IncoherenceFound",
    "MessageAdded",
    "MessageSent",
    "Notified",
    "Planned",
    "PlannedStep",
    "Received",
    "Repaired",
    "Replayed",
    "Resumed",
    "Returned",
    "Snapshot",
    "Snoozed",
    "Started",
    "StepCompleted",
    "StepFailed",
    "StepStarted",
    "ToolCalled",
    "WaitStarted",
    "Waited",
]


Count = Annotated[int, Field(ge=0)]


class Event(BaseModel):
    """Base of all events. Own ones: subclass it with a `type` of your own, and `register_event` it.

    v: the version of the form in which it was written. step: the key of the step in which it happened. changes: what it
    does to the state besides what its type says, as a JSON Patch (RFC 6902; operations add, remove and replace).
    own: whether the type is an application's, and not Perdure's.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True, ser_json_inf_nan="strings")
    version: ClassVar[int] = 1
    """The version of the form that this class writes, and the latest that it reads."""

    type: str
    v: int = 1
    step: str | None = None
    changes: tuple[dict[str, Any], ...] = ()
    own: bool = False

    def model_post_init(self, _context: Any, /) -> None:
        """What is made here, and not read, is of this class's own version."""
        if self.version != 1 and "v" not in self.model_fields_set:
            object.__setattr__(self, "v", self.version)
        if TYPES.get(self.type) is not type(self):
            object.__setattr__(self, "own", True)

    def told(self) -> bytes:
        """The event's data as JSON: all but its type, without what was not said."""
        return self.model_dump_json(exclude={"type"}, exclude_defaults=True).encode()

    def as_read(self, data: bytes) -> Self:
        """The event as readers of the log will find it, whose data this is: dates as text, tuples as lists."""
        return type(self).model_validate({"v": 1, **orjson.loads(data), "type": self.type})


# what a run does


class Started(Event):
    """The first run began."""

    type: Literal["started"] = "started"
    goal: str | None = None
    agent: str | None = None


class Resumed(Event):
    """A run went on where another had stopped. after: why that had stopped. gap: seconds in which nobody worked.

    restored: what was found, by kind (steps, events, decisions, messages and so on).
    """

    type: Literal["resumed"] = "resumed"
    after: Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]
    gap: float | None = None
    restored: dict[str, int] = {}
    summary: str = ""


class PlannedStep(BaseModel):
    """A step as a plan lists it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    key: str
    title: str


class Planned(Event):
    """A plan was made, or made anew: then what was open in the former one is replaced."""

    type: Literal["planned"] = "planned"
    steps: tuple[PlannedStep, ...] = ()
    why: str = ""
    again: bool = False


class StepStarted(Event):
    """A step of a plan, or a risky step, is about to act."""

    type: Literal["step_started"] = "step_started"
    title: str = ""
    attempt: int = 1


class StepCompleted(Event):
    """A step has its result. result: of a step of a plan; of others it is in the checkpoint."""

    type: Literal["step_completed"] = "step_completed"
    attempt: int = 1
    result: Any = None


class StepFailed(Event):
    """A try of a step raised. tool: which one it called, where it was the call of one."""

    type: Literal["step_failed"] = "step_failed"
    attempt: int = 1
    tool: str | None = None
    error: str = ""
    message: str = ""


class ToolCalled(Event):
    """A tool was called and answered. step: the key of its record. call: the id by which a model asked for it.

    clipped: bytes of the result, where it was too large for the log, which then has its beginning.
    """

    type: Literal["tool_called"] = "tool_called"
    tool: str
    arguments: dict[str, Any] = {}
    result: Any = None
    reasoning: str = ""
    call: str | None = None
    attempt: int = 1
    clipped: int | None = None


class Decided(Event):
    """A choice was made. alternatives: what was left open."""

    type: Literal["decided"] = "decided"
    choice: str
    reasoning: str = ""
    alternatives: tuple[str, ...] = ()


class Discovered(Event):
    """A fact was found. source: where."""

    type: Literal["discovered"] = "discovered"
    fact: str
    source: str = ""


class MessageAdded(Event):
    """The conversation went on by one turn."""

    type: Literal["message_added"] = "message_added"
    message: Message


class ArtifactSaved(Event):
    """An artifact was saved. hash: SHA-256 of its bytes, in hexadecimal. size: bytes."""

    type: Literal["artifact_saved"] = "artifact_saved"
    name: str
    hash: str
    size: Count
    media_type: str = "application/octet-stream"


class Snapshot(Event):
    """The state was stored whole. at: the number of the last event in it. size: bytes."""

    type: Literal["snapshot"] = "snapshot"
    at: Count
    size: Count


class Compacted(Event):
    """The oldest turns of the conversation were replaced by a summary. messages: how many turns.

    first, last: numbers of the events that it stands for.
    """

    type: Literal["compacted"] = "compacted"
    first: Count
    last: Count
    messages: Count
    summary: str = ""


class Repaired(Event):
    """Calls of tools that a crash had left without a result got one that says so."""

    type: Literal["repaired"] = "repaired"
    calls: tuple[str, ...] = ()


class Received(Event):
    """A message of the inbox was read and used. number: its place in the inbox."""

    type: Literal["received"] = "received"
    number: int
    sender: str = ""
    content: Any = None


class WaitStarted(Event):
    """Nothing can be done before something comes. what: such as "message" or "approval". on: whom."""

    type: Literal["waiting"] = "waiting"
    what: str = ""
    on: str = ""
    why: str = ""


class Waited(Event):
    """What it waited for did not come in time."""

    type: Literal["waited"] = "waited"


class MessageSent(Event):
    """A message was put into the inbox of another task. to: its id. number: its place there."""

    type: Literal["message_sent"] = "message_sent"
    to: str
    number: int = 0
    content: Any = None


class Notified(Event):
    """Somebody was told. how: such as "webhook"."""

    type: Literal["notified"] = "notified"
    what: str
    how: str = ""
    failed: str | None = None


class IncoherenceFound(Event):
    """A check found that the agent no longer knows what it does. policy: what followed."""

    type: Literal["incoherent"] = "incoherent"
    check: str
    detail: str = ""
    policy: str = "warn"


class Changed(Event):
    """The state was changed; `changes` says how."""

    type: Literal["changed"] = "changed"


class Finished(Event):
    """The goal is reached."""

    type: Literal["finished"] = "finished"
    summary: str = ""


class Forked(Event):
    """This task began as a copy of another one. at: the number of the last event that was copied."""

    type: Literal["forked"] = "forked"
    source: str
    at: Count


# what happens to a run


class HandedOff(Event):
    """A run stopped on purpose. why: such as "shutdown". to: the task that goes on, where it is another."""

    type: Literal["handed_off"] = "handed_off"
    why: str = ""
    to: str | None = None
    steps: int | None = None
    summary: str = ""


class _Failure(Event):
    error: str = ""
    message: str = ""
    traceback: str = ""
    attempts: int = 0
    delay: float | None = None


class AttemptFailed(_Failure):
    """An attempt raised, and there will be another."""

    type: Literal["attempt_failed"] = "attempt_failed"


class Snoozed(_Failure):
    """The handler asked to be run again later."""

    type: Literal["snoozed"] = "snoozed"


class Returned(_Failure):
    """A worker could not run it and gave it back for others."""

    type: Literal["returned"] = "returned"


class CrashBackoff(_Failure):
    """It waits because it crashed more than once."""

    type: Literal["crash_backoff"] = "crash_backoff"


class Buried(_Failure):
    """It was given up."""

    type: Literal["buried"] = "buried"


class Crashed(Event):
    """A supervisor saw its worker die. how: such as "SIGKILL"."""

    type: Literal["crashed"] = "crashed"
    how: str = ""
    worker: str = ""


class Cleared(Event):
    """It is no longer suspected of having killed its worker."""

    type: Literal["cleared"] = "cleared"


class Replayed(Event):
    """A person put it back from the dead letters. fresh: without its checkpoint."""

    type: Literal["replayed"] = "replayed"
    fresh: bool = False


TYPES: Final[dict[str, type[Event]]] = {
    kind.model_fields["type"].default: kind
    for kind in (
        Started,
        Resumed,
        Planned,
        StepStarted,
        StepCompleted,
        StepFailed,
        ToolCalled,
        Decided,
        Discovered,
        MessageAdded,
        ArtifactSaved,
        Snapshot,
        Compacted,
        Repaired,
        Received,
        WaitStarted,
        Waited,
        MessageSent,
        Notified,
        IncoherenceFound,
        Changed,
        Finished,
        Forked,
        HandedOff,
        AttemptFailed,
        Snoozed,
        Returned,
        CrashBackoff,
        Buried,
        Crashed,
        Cleared,
        Replayed,
    )
}
"""Perdure's own types by name."""
