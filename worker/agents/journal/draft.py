"""Drafting of a handoff document: a pure function of the state, the latest events and the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ....queues.doubts import open_doubts, undecided
from ....queues.event_log import LogTail, TaskEvent
from ....queues.explanation.sentences import remedy_for
from ....queues.json_form import as_json
from ....queues.keys import SNAPSHOT
from ...durable.journal.chat import FROM_INBOX
from ...durable.journal.event import Event
from ...durable.journal.failure_record import is_failure
from ...durable.journal.function_plan import FunctionPlan, state_of
from ...durable.journal.handoff.budget import fitted
from ...durable.journal.handoff.document import (
    REMEDY,
    AwaitedAnswer,
    CallInFlight,
    CompletedStep,
    Dependencies,
    DoubtfulStep,
    DroppedStep,
    FoundFact,
    Handoff,
    MadeDecision,
    OpenPromise,
    OpenQuestion,
    OpenStep,
    ToolUse,
    Why,
)
from ...durable.journal.parsing import Unreadable, parse_event
from ...durable.journal.run_events import StepFailed
from ...durable.journal.step_record import PLANNED, result_text
from ...durable.journal.tool_notes import TOOLS, noted_call, tool_counts
from ...durable.promises import as_commitments, stored_promises
from ...errors import BadSnapshot
from .agent_events import Dismissed
from .json_patch import BadPatch
from .reducer import empty_state, reduce
from .snapshot import StoredState, decode_snapshot

P = TypeVar("P", bound=BaseModel)

STORED_TOKENS: Final = 4000
"""Limit of a stored document's JSON in tokens: more than is shown by default, so that a reader may ask for more."""

_LATEST: Final = 50
"""Number of latest decisions and discoveries that a draft contains."""

_SAID: Final = 20
"""Number of latest messages of the user that a draft contains."""

CONFIRMATION: Final = "confirmation"
"""Kind of the wait of a task that has asked whether to continue."""

_FAILED: Final = ("attempt_failed", "buried")
_LAST: Final = (*_FAILED, "step_completed", "tool_called", "finished")
"""Types of events of an error that stopped a run, and of work that was done since."""

_ENDS: Final = ("step_completed", "step_failed", "tool_called")
"""Types of events of the end of a step."""

_NO_INTENTS: Final[Mapping[str, bytes]] = {}


def handoff_of(
    tail: LogTail,
    *,
    task: str,
    session: str,
    why: Why,
    goal: str = "",
    detail: str = "",
    at: int | None = None,
    to: str | None = None,
    message: str = "",
    number: int | None = None,
    in_flight: Iterable[str] = (),
    attention: Iterable[str] = (),
    waiting: AwaitedAnswer | None = None,
) -> Handoff:
    """Return the handoff document of a task from the tail of its log, short enough to be stored. See `build_handoff`.

    Args:
        at: Time in milliseconds, else that of the tail.
        number: Number of the last event, if the log has one more than the tail.
    """
    stored = _snapshot_in(session, tail)
    state = state_after(stored, tail.events)
    if stored is None and (promises := stored_promises(session, tail.saved)) is not None:
        state["commitments"] = as_commitments(promises)
    started = next((one.data for one in tail.events if one.type == "started" and isinstance(one.data, dict)), {})
    in_flight = tuple(in_flight)
    if stored is None and (plan := FunctionPlan.decode(tail.saved.get(PLANNED))) is not None:
        running = {*in_flight, *tail.intents}
        state |= state_of(plan, tail.done, running=running, failed=failed_steps(tail))
    handoff = build_handoff(
        state,
        tail.events,
        task=task,
        session=session,
        why=why,
        agent=stored.agent if stored is not None else started.get("agent"),
        goal=goal,
        detail=detail,
        at=tail.now if at is None else at,
        to=to,
        message=message,
        number=tail.number if number is None else number,
        done=tail.done,
        intents=tail.intents,
        tools=tool_counts(tail.saved.get(TOOLS)),
        in_flight=in_flight,
        attention=attention,
        unread=tail.unread,
        waiting=waiting,
    )
    return fitted(handoff, STORED_TOKENS, form=lambda one: one.to_json().decode())


def failed_steps(tail: LogTail) -> set[str]:
    """Return the keys of the recorded steps whose record is a failure: their latest event says so, or the record."""
    latest = {event.step: event.type for event in tail.events if event.step is not None and event.type in _ENDS}
    failed = {key for key in tail.done if latest.get(key) == "step_failed"}
    if isinstance(tail.done, Mapping):
        failed |= {key for key, record in tail.done.items() if is_failure(record)}
    return failed


def _snapshot_in(session: str, tail: LogTail) -> StoredState | None:
    """Return the snapshot of an agent; a damaged one counts as none: the resumed run raises it."""
    try:
        snapshot = tail.saved.get(SNAPSHOT)
        return None if snapshot is None else decode_snapshot(session, snapshot, tail.saved)
    except BadSnapshot:
        return None


def latest_state(session: str, tail: LogTail) -> tuple[dict[str, Any], str | None] | None:
    """Return the latest state of an agent and its name, from its snapshot and the tail of its log.

    None if the tail does not reach back to the snapshot, or to the first event: the whole log has to be read then.
    """
    stored = _snapshot_in(session, tail)
    first = next((event.number for event in tail.events if event.number is not None), None)
    if first is None or first > (0 if stored is None else stored.number) + 1:
        return None
    started = next((one.data for one in tail.events if one.type == "started" and isinstance(one.data, dict)), {})
    return state_after(stored, tail.events), stored.agent if stored is not None else started.get("agent")


def open_promises_in(session: str, tail: LogTail) -> Sequence[OpenPromise]:
    """Return the open promises of a task from the tail of its log."""
    stored = _snapshot_in(session, tail)
    if stored is None and (promises := stored_promises(session, tail.saved)) is not None:
        return promises
    return [*_promises(state_after(stored, tail.events))]


def state_after(stored: StoredState | None, events: Sequence[TaskEvent]) -> dict[str, Any]:
    """Return the state after a snapshot and the events that follow it; without a snapshot, what the events imply.

    Events that cannot be read or applied are skipped: a report for readers must not fail.

    Args:
        events: The oldest first.
    """
    state = empty_state() if stored is None else stored.state
    is_whole = next((found.number for found in events if found.number is not None), 0) == 1
    for found in events:
        if stored is not None and (found.number is None or found.number <= stored.number):
            continue
        event = parse_event(found)
        if isinstance(event, Unreadable):
            continue
        if stored is None and event.changes and not is_whole:  # a patch of a state whose beginning is missing
            event = event.model_copy(update={"changes": ()})
        try:
            state = reduce(state, event, found.number or 0)
        except (BadPatch, LookupError, TypeError):
            continue
    return state


def build_handoff(
    state: Mapping[str, Any],
    events: Sequence[TaskEvent],
    *,
    task: str,
    session: str,
    why: Why,
    agent: str | None = None,
    goal: str = "",
    detail: str = "",
    at: int | None = None,
    to: str | None = None,
    message: str = "",
    number: int = 0,
    done: Collection[str] = (),
    intents: Mapping[str, bytes] = _NO_INTENTS,
    tools: Mapping[str, int] | None = None,
    in_flight: Iterable[str] = (),
    attention: Iterable[str] = (),
    unread: int = 0,
    waiting: AwaitedAnswer | None = None,
) -> Handoff:
    """Return a handoff document.

    Args:
        state: State with the fields of `AgentState`.
        events: Latest events, the oldest first.
        session: Id of the task.
        goal: Goal, if the state has none: the call of a function.
        at: Time in milliseconds, by the Redis clock.
        number: Number of the last event.
        done: Checkpoint keys of the recorded steps.
        intents: Stored intents, by step: of risky steps, which are in doubt, and notes of tool calls in flight.
        tools: Number of calls by tool; if there are none, those in the events are counted.
        in_flight: Keys of the steps that were running.
        attention: What else needs attention next, before what the events say.
        unread: Number of unread messages in the inbox.
        waiting: Answer that is waited for, if the state does not say.
    """
    parsed = [parse_event(found) for found in events]
    first = _archived(state, "steps") + 1
    plan = [
        step.model_copy(update={"number": at}) for at, step in enumerate(_parts(OpenStep, state.get("plan")), first)
    ]
    cut_off, results = set(in_flight), state.get("results")
    status = {
        step.get("key"): _status(step.get("key"), step.get("status"), done, cut_off)
        for step in _objects(state.get("plan"))
    }
    finished = [step.key for step in plan if status.get(step.key) == "done"]
    running = [step for step in plan if status.get(step.key) == "running"]
    known = {step.key for step in plan}
    running += [OpenStep(key=key) for key in sorted(cut_off) if key not in known]
    steps = [key for key in done if not _is_event(key)]
    notes = tuple(attention)
    calls = {key: noted_call(intent) for key, intent in sorted(intents.items())}
    waits = _parts(AwaitedAnswer, [state.get("waiting_for")]) or ([waiting] if waiting is not None else [])
    doubtful = {
        doubt.step: DoubtfulStep(key=doubt.step, idempotency_key=doubt.idempotency_key, arguments=doubt.arguments)
        for doubt in undecided(open_doubts(session, intents))
    }
    doubtful |= {
        step.key: DoubtfulStep(key=step.key, idempotency_key=f"{session}:{step.key}")
        for step in running
        if step.risky and step.key not in doubtful
    }
    if why == "waiting" and all(wait.what != CONFIRMATION for wait in waits):  # a wait is what the step has done so far
        doubtful = {key: doubt for key, doubt in doubtful.items() if key not in known}
    completed = _logged(parsed, plan, done) if agent is None else _completed(plan, status, results)
    return Handoff(
        task=task,
        agent=agent,
        session=session,
        why=why,
        detail=detail,
        at=at,
        events=number,
        to=to,
        goal=_text(state.get("goal")) or goal,
        message=message,
        summary=_summary(state, parsed),
        steps=len(finished) + first - 1 if plan else len(steps),
        total=len(plan) + first - 1 if plan else 0,
        completed=tuple(completed)[-_LATEST:],
        messages=len(_objects(state.get("messages"))) + _archived(state, "messages"),
        last_completed=next((key for key in reversed(status) if status[key] == "done"), None)
        or _last_completed(parsed),
        in_progress=tuple(running),
        pending=tuple(step for step in plan if status.get(step.key) == "pending"),
        replaced=() if why == "finished" else tuple(_parts(DroppedStep, state.get("replaced")))[-_LATEST:],
        decisions=tuple(_parts(MadeDecision, state.get("decisions"))[-_LATEST:]),
        discoveries=tuple(_parts(FoundFact, state.get("discoveries"))[-_LATEST:]),
        attention=(
            *notes,
            *_attention(
                plan,
                status,
                () if why == "finished" else parsed,
                known=bool(notes),
            ),
        ),
        waiting_on=tuple(waits),
        promises=tuple(_promises(state)),
        questions=tuple(_parts(OpenQuestion, state.get("questions"))),
        constraints=tuple(_constraints(state))[-_SAID:],
        artifacts=tuple(_text(one.get("name")) for one in _objects(state.get("artifacts"))),
        files=tuple(_text(one.get("path")) for one in _objects(state.get("files")))[-_LATEST:],
        dependencies=Dependencies(
            tools=_tools(Counter(tools) if tools else _called(parsed)),
            in_flight=tuple(CallInFlight(key=key, call=call) for key, call in calls.items() if call is not None),
            in_doubt=tuple(doubtful.values()),
            unread=unread,
        ),
    )


def _status(key: Any, status: Any, done: Collection[str], in_flight: Collection[str]) -> Any:
    """Return the status of a step of a plan. The state of a function has only its beginning."""
    if status in ("pending", "running") and key in done:
        return "done"
    return "running" if status == "pending" and key in in_flight else status


def _completed(plan: Sequence[OpenStep], status: Mapping[Any, Any], results: Any) -> Iterable[CompletedStep]:
    """Yield the completed steps of an agent's plan with their results."""
    held = results if isinstance(results, dict) else {}
    for step in plan:
        if status.get(step.key) == "done":
            result = result_text(as_json(held[step.key])) if held.get(step.key) is not None else ""
            yield CompletedStep(key=step.key, title=step.title, result=result)


def _logged(events: Sequence[Event], plan: Sequence[OpenStep], done: Collection[str]) -> Iterable[CompletedStep]:
    """Yield the recorded steps whose end the latest events have, in their order; one may have failed."""
    titles = {step.key: step.title for step in plan}
    found = [event.step for event in events if event.type in _ENDS]
    for key in dict.fromkeys(found):
        if key is not None and key in done:
            yield CompletedStep(key=key, title=titles.get(key, ""))


def _constraints(state: Mapping[str, Any]) -> Iterable[str]:
    """Yield what the user has said besides the goal: later copies of a summary, no summary, nothing from the inbox."""
    for message in _objects(state.get("messages")):
        text = _text(message.get("content"))
        said = message.get("role") == "user" and message.get("name") not in ("summary", FROM_INBOX)
        if said and text.strip() and text != state.get("goal"):
            yield text


def burial_notes(
    events: Sequence[TaskEvent],
    session: str,
    reason: str,
    error: str,
    message: str,
    *,
    step: object = None,
    intents: Mapping[str, bytes] = _NO_INTENTS,
) -> Iterable[str]:
    """Yield what needs attention in a dead letter: the failed step with the error, and how to continue.

    Args:
        events: Latest events, the oldest first.
        session: Id of the task.
        error: Name of the error. message: its text.
        step: Step in which the worker died.
        intents: Stored intents, by step.
    """
    if step is not None:
        yield f"step {step} killed its worker: {error}: {message}"
    else:
        failed = _failed_step(events, error, message)
        yield f"step {failed} failed: {error}: {message}" if failed else f"it failed: {error}: {message}"
    yield f"{REMEDY}{remedy_for(reason, session, error, doubts=open_doubts(session, intents))}"


def _failed_step(events: Sequence[TaskEvent | Event], error: str, message: str) -> str | None:
    """Return the step whose failure the latest events have with this error."""
    for event in reversed(events):
        if event.type in ("resumed", "replayed"):
            break
        found = parse_event(event) if isinstance(event, TaskEvent) else event
        if isinstance(found, StepFailed) and (found.error, found.message) == (error, message):
            return event.step
    return None


def _archived(state: Mapping[str, Any], kind: str) -> int:
    """Return how many steps or messages have left the state."""
    archive = state.get("archive")
    count = archive.get(kind) if isinstance(archive, dict) else 0
    return count if isinstance(count, int) else 0


def _is_event(key: str) -> bool:
    """Return whether a record belongs to an event (`#decided`, `read/#discovered#2`) and not to a step."""
    return key.rpartition("/")[2].startswith("#")


def _last_completed(events: Sequence[Event]) -> str | None:
    for event in reversed(events):
        if event.type == "step_completed" and event.step is not None:
            return event.step
        if event.type == "tool_called":
            return _text(getattr(event, "tool", None))
    return None


def _attention(
    plan: Sequence[OpenStep],
    status: Mapping[Any, Any],
    events: Sequence[Event],
    *,
    known: bool,
) -> Iterable[str]:
    """Yield failed steps, the error that stopped the last run, and findings.

    known: the error is listed already.
    """
    for step in plan:
        if status.get(step.key) == "failed":
            yield f"step {step.key} failed{f': {step.error}' if step.error else ''}"
    failure = next((one for one in reversed(events) if one.type in _LAST), None)
    if failure is not None and failure.type in _FAILED and not known:
        error = f"{getattr(failure, 'error', '')}: {getattr(failure, 'message', '')}"
        failed = _failed_step(events, getattr(failure, "error", ""), getattr(failure, "message", ""))
        if all(error != shown.error for shown in plan):  # else that step says so
            yield f"the last error: {error}" if failed is None else f"step {failed} failed: {error}"
    dismissed = {event.finding for event in events if isinstance(event, Dismissed)}
    for event in events:
        if event.type == "incoherent" and getattr(event, "key", "") not in dismissed:
            yield f"incoherent ({getattr(event, 'check', '')}): {getattr(event, 'detail', '')}"


def _called(events: Sequence[Event]) -> Counter[str]:
    return Counter(_text(getattr(event, "tool", None)) for event in events if event.type == "tool_called")


def _tools(called: Counter[str]) -> tuple[ToolUse, ...]:
    return tuple(ToolUse(tool=tool, calls=calls) for tool, calls in called.most_common())


def _summary(state: Mapping[str, Any], events: Sequence[Event]) -> str:
    """Return the latest summary: of the end, or of the conversation so far."""
    for event in reversed(events):
        if event.type in ("finished", "compacted") and (summary := _text(getattr(event, "summary", None))):
            return summary
    summaries = [one for one in _objects(state.get("messages")) if one.get("name") == "summary"]
    return _text(summaries[-1].get("content")) if summaries else ""


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list of the state, to which a user's class may have given another form."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list | tuple) else []


def _parts(kind: type[P], value: Any) -> list[P]:
    found = []
    for one in _objects(value):
        try:
            found.append(kind.model_validate(one))
        except ValidationError:
            continue
    return found


def _promises(state: Mapping[str, Any]) -> Iterable[OpenPromise]:
    """Return the open promises, the one that is due first in front."""
    promises = _parts(OpenPromise, [one for one in _objects(state.get("commitments")) if not one.get("done")])
    return sorted(promises, key=lambda promise: inf if promise.due is None else promise.due.timestamp())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
