"""Events of a run: its start, steps, waits, messages to and from other tasks, and its end.

To add a type, write the class here or in `agent_events.py`, add a row to the reference of events and, if the event
changes the state of an agent, a rule to `reducer.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from .chat import Message
from .event import Count, Event, built_in
from .handoff.document import OpenPromise

# start


@built_in
class Started(Event):
    """Start of a task's first run.

    Attributes:
        turn: Message of the session whose turn the task is, without its content, which is the goal.
    """

    type: Literal["started"] = "started"
    goal: str | None = None
    agent: str | None = None
    turn: Message | None = None


@built_in
class Resumed(Event):
    """Start of a run that resumes the work of an earlier one.

    Attributes:
        after: Reason why the earlier run stopped.
        gap: Seconds during which no worker ran the task.
        queued: Seconds of the gap during which its message waited for a worker; None if its worker was lost.
        restored: Number of restored records by kind (steps, events, decisions, messages and so on).
        summary: All of it as one line, for operators.
        text: The same for the user of the task, in plain words.
    """

    type: Literal["resumed"] = "resumed"
    after: Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]
    gap: float | None = None
    queued: float | None = None
    restored: dict[str, int] = Field(default={})
    summary: str = ""
    text: str = ""


@built_in
class Forked(Event):
    """Start of a task as a copy of another one.

    Attributes:
        at: Number of the last event that was copied.
        workspace: Link of the files that it starts with; None if there are none.
    """

    type: Literal["forked"] = "forked"
    source: str
    at: Count
    workspace: dict[str, JsonValue] | None = None


# steps


class PlannedStep(BaseModel):
    """Step as a plan lists it."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True, ser_json_inf_nan="strings")

    key: str
    title: str


@built_in
class Planned(Event):
    """New plan. again: whether it replaces the open steps of an earlier plan."""

    type: Literal["planned"] = "planned"
    steps: tuple[PlannedStep, ...] = ()
    why: str = ""
    again: bool = False


@built_in
class StepStarted(Event):
    """Start of a step of a plan, or of a risky step, before it acts."""

    type: Literal["step_started"] = "step_started"
    title: str = ""
    attempt: int = 1


@built_in
class StepCompleted(Event):
    """Result of a step.

    Attributes:
        result: Of a step of a plan; results of other steps are in the checkpoint.
        ms: Milliseconds from the start of the step in this run, its tries and the time between them included; 0 of a
            step of a plan, which has `step_started`.
    """

    type: Literal["step_completed"] = "step_completed"
    attempt: int = 1
    ms: Count = 0
    result: Any = None


@built_in
class StepFailed(Event):
    """Exception of one try of a step. tool: name of the tool, if the step is a tool call."""

    type: Literal["step_failed"] = "step_failed"
    attempt: int = 1
    tool: str | None = None
    error: str = ""
    message: str = ""


@built_in
class StepResolved(Event):
    """A person's decision about a risky step that was cut off.

    Attributes:
        decision: `result`, `failed` or `run_again`.
        by: Name of the person.
        result: Value that the step returns.
        failed: Text of the failure.
    """

    type: Literal["step_resolved"] = "step_resolved"
    decision: str
    by: str = ""
    result: Any = None
    failed: str = ""


@built_in
class FailuresDropped(Event):
    """Removal of the recorded failures of steps by an operator, so that these steps are called again.

    Attributes:
        steps: Their keys, at most 20.
        count: How many there are.
    """

    type: Literal["failures_dropped"] = "failures_dropped"
    steps: tuple[str, ...] = ()
    count: Count = 0


# waits and messages


@built_in
class Received(Event):
    """Message that the handler read from its inbox. number: its position in the inbox."""

    type: Literal["received"] = "received"
    number: int
    sender: str = ""
    content: Any = None


@built_in
class WaitStarted(Event):
    """Start of a wait.

    Attributes:
        what: Kind of thing, such as "message", "answer" or "time".
        on: Sender that is expected.
        why: Reason, or the question.
        withdrawn: Question that this one replaces.
        until: Time at which it ends anyway, in milliseconds of Redis' clock since the epoch.
        wait: Id by which it is answered: of a wait for an answer.
    """

    type: Literal["waiting"] = "waiting"
    what: str = ""
    on: str = ""
    why: str = ""
    withdrawn: str = ""
    until: int | None = None
    wait: str = ""


@built_in
class Waited(Event):
    """End of a wait without a message or an answer.

    Attributes:
        wait: Id of a wait for an answer.
        closed: The call was cancelled, since another branch of `ctx.first` ended first.
    """

    type: Literal["waited"] = "waited"
    wait: str = ""
    closed: bool = False


@built_in
class Answered(Event):
    """Answer that the handler got.

    Attributes:
        wait: Id of the wait.
        by: Name of the sender.
        early: Whether it came before the wait.
    """

    type: Literal["answered"] = "answered"
    wait: str
    by: str = ""
    value: Any = None
    early: bool = False


@built_in
class AnswerDropped(Event):
    """Answer that the handler did not get, because it was void; the wait stays open. why: reason."""

    type: Literal["answer_dropped"] = "answer_dropped"
    wait: str
    by: str = ""
    why: str = ""


@built_in
class BudgetLow(Event):
    """Notice that most of a budget is used.

    Attributes:
        budget: Its name; empty for one of the task itself.
        ledger: By which operators raise it.
        used: What is used, such as "160,000 of 200,000 tokens".
    """

    type: Literal["budget_low"] = "budget_low"
    budget: str = ""
    ledger: str = ""
    used: str = ""


@built_in
class ChildrenSpawned(Event):
    """Children that the handler spawned.

    Attributes:
        task: Name of their task.
        count: How many they are.
        child: Id of the first.
    """

    type: Literal["children_spawned"] = "children_spawned"
    task: str
    count: Count = 1
    child: str = ""


@built_in
class ChildrenJoined(Event):
    """End of the children of a call, or of another task that the handler awaited.

    Attributes:
        count: How many they are.
        failed: How many ended without a result, of those that the call has read.
        child: Id of the awaited task, if it is one.
    """

    type: Literal["children_joined"] = "children_joined"
    count: Count = 1
    failed: Count = 0
    child: str = ""


@built_in
class MessageSent(Event):
    """Message that the handler put into another task's inbox. to: id of that task. number: position in its inbox."""

    type: Literal["message_sent"] = "message_sent"
    to: str
    number: int = 0
    content: Any = None


@built_in
class Promised(Event):
    """Promise that one party has made to another. by, to: their names; "me" is the task. due: until when, if agreed."""

    type: Literal["promised"] = "promised"
    what: str
    by: str = "me"
    to: str = "me"
    due: AwareDatetime | None = None


@built_in
class PromiseKept(Event):
    """End of a promise: it was kept. what, by, to: those of the promise."""

    type: Literal["promise_kept"] = "promise_kept"
    what: str
    by: str = "me"
    to: str = "me"


@built_in
class LeftPromises(Event):
    """Promises that were open when the task ended. promises: the first 20 of them."""

    type: Literal["left_promises"] = "left_promises"
    count: Count
    promises: tuple[OpenPromise, ...] = ()


@built_in
class Notified(Event):
    """Notification that was sent, or could not be. how: channel, such as "webhook"."""

    type: Literal["notified"] = "notified"
    what: str
    how: str = ""
    failed: str | None = None


# end


@built_in
class HandedOff(Event):
    """Deliberate end of a run whose work another run continues.

    Attributes:
        why: Reason, such as "shutdown".
        to: Id of the successor, if another task continues the work.
        steps: Number of recorded steps.
    """

    type: Literal["handed_off"] = "handed_off"
    why: str = ""
    to: str | None = None
    steps: int | None = None
    summary: str = ""


@built_in
class LimitLost(Event):
    """End of a run whose token of a limit was gone, and which found no room for another one.

    Attributes:
        limit: Name of the limit.
    """

    type: Literal["limit_lost"] = "limit_lost"
    limit: str = ""


class _Failure(Event):
    error: str = ""
    message: str = ""
    traceback: str = ""
    attempts: int = 0
    delay: float | None = None


@built_in
class AttemptFailed(_Failure):
    """Failure of an attempt that is followed by another one."""

    type: Literal["attempt_failed"] = "attempt_failed"


@built_in
class Snoozed(_Failure):
    """Request of the handler to run again later."""

    type: Literal["snoozed"] = "snoozed"


@built_in
class Returned(_Failure):
    """Release of a task that this worker could not run."""

    type: Literal["returned"] = "returned"


@built_in
class CrashBackoff(_Failure):
    """Delay of a task that crashed more than once."""

    type: Literal["crash_backoff"] = "crash_backoff"


@built_in
class Buried(_Failure):
    """Burial of the task: it is a dead letter now."""

    type: Literal["buried"] = "buried"


@built_in
class Exported(Event):
    """Export of the task, which ended here, to another deployment. digest: SHA-256 of the file."""

    type: Literal["exported"] = "exported"
    digest: str = ""


@built_in
class Orphaned(Event):
    """Recorded steps that a run with a result did not ask for: they were renamed or removed, or have other arguments.

    Attributes:
        steps: Their keys, at most 20.
        count: How many there are.
    """

    type: Literal["orphaned"] = "orphaned"
    steps: tuple[str, ...] = ()
    count: Count = 0


@built_in
class LeftUnread(Event):
    """Messages that the task left unread when it ended with a result."""

    type: Literal["left_unread"] = "left_unread"
    count: Count


@built_in
class DataLost(Event):
    """Loss of entries that the run could not send again: the task resumes after `last_entry`, the last stored one."""

    type: Literal["data_lost"] = "data_lost"
    last_entry: int = 0


@built_in
class StepOutdated(Event):
    """New run of a recorded step: its arguments differ, and events before its record are missing, `first` to `last`."""

    type: Literal["step_outdated"] = "step_outdated"
    first: int
    last: int


@built_in
class Crashed(Event):
    """Death of the worker process, reported by its supervisor. how: exit status, such as "SIGKILL"."""

    type: Literal["crashed"] = "crashed"
    how: str = ""
    worker: str = ""


@built_in
class Cleared(Event):
    """End of the suspicion that the task kills workers."""

    type: Literal["cleared"] = "cleared"


@built_in
class Replayed(Event):
    """Replay of the dead letter by an operator. fresh: without its checkpoint."""

    type: Literal["replayed"] = "replayed"
    fresh: bool = False


@built_in
class ToolCalled(Event):
    """Call of a tool and its result.

    Attributes:
        step: Key of the step record.
        call: Id under which the model requested the call.
        clipped: Size of the result in bytes if it was too large for the log, which then has its beginning.
        ms: Milliseconds from the start of the call in this run, its tries and the time between them included.
    """

    type: Literal["tool_called"] = "tool_called"
    tool: str
    arguments: dict[str, Any] = Field(default={})
    result: Any = None
    reasoning: str = ""
    call: str | None = None
    attempt: int = 1
    clipped: int | None = None
    ms: Count = 0
