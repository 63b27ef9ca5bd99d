"""Drawing up a handoff: pure, from a state, the latest events and what the checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ....queues import LogTail, TaskEvent
from ...errors import BadSnapshot
from ..event import Event
from ..json_patch import BadPatch
from ..parsing import Unreadable, parse_event
from ..reducer import empty_state, reduce
from ..snapshot import SNAPSHOT, StoredState, decode_snapshot
from .budget import fitted
from .document import (
    AwaitedAnswer,
    Dependencies,
    DoubtfulStep,
    FoundFact,
    Handoff,
    MadeDecision,
    OpenStep,
    ToolUse,
    Why,
)

__all__ = ["STORED_TOKENS", "build_handoff", "handoff_of", "state_after"]

P = TypeVar("P", bound=BaseModel)

STORED_TOKENS: Final = 4000
"""Tokens that the JSON of a handoff has at most where it is kept: more than is shown, so that one may ask for more."""

_LATEST: Final = 50
"""Decisions and discoveries that a handoff has before it is compressed."""


def handoff_of(
    trail: LogTail,
    *,
    task: str,
    session: str,
    why: Why,
    detail: str = "",
    to: str | None = None,
    message: str = "",
    number: int | None = None,
    in_flight: Iterable[str] = (),
    waiting: AwaitedAnswer | None = None,
) -> Handoff:
    """The handoff of a task as its trail tells it, small enough to be kept. See `build_handoff`.

    number: of the last event, where there is one more than the trail has.
    """
    stored = None
    if (snapshot := trail.saved.get(SNAPSHOT)) is not None:
        try:
            stored = decode_snapshot(session, snapshot, trail.saved)
        except BadSnapshot:
            stored = None  # whoever goes on with the state hears of it; what the log tells is told all the same
    started = next((one.data for one in trail.events if one.type == "started" and isinstance(one.data, dict)), {})
    handoff = build_handoff(
        state_after(stored, trail.events),
        trail.events,
        task=task,
        session=session,
        why=why,
        agent=stored.agent if stored is not None else started.get("agent"),
        detail=detail,
        at=trail.now,
        to=to,
        message=message,
        number=trail.number if number is None else number,
        done=trail.done,
        intents=trail.intents,
        in_flight=in_flight,
        unread=trail.unread,
        waiting=waiting,
    )
    return fitted(handoff, STORED_TOKENS, form=lambda one: one.to_json().decode())


def state_after(stored: StoredState | None, events: Sequence[TaskEvent]) -> dict[str, Any]:
    """The state that a snapshot and the events after it come to; without a snapshot, what those events alone tell.

    events: the oldest first. What cannot be read or applied is passed over: a document for readers is no place to fail.
    """
    state = empty_state() if stored is None else stored.state
    for found in events:
        if stored is not None and (found.number is None or found.number <= stored.number):
            continue
        event = parse_event(found)
        if isinstance(event, Unreadable):
            continue
        if stored is None and event.changes:  # of a state whose beginning is not here
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
    detail: str = "",
    at: int | None = None,
    to: str | None = None,
    message: str = "",
    number: int = 0,
    done: Collection[str] = (),
    intents: Iterable[str] = (),
    in_flight: Iterable[str] = (),
    unread: int = 0,
    waiting: AwaitedAnswer | None = None,
) -> Handoff:
    """A handoff from what is known. state: as `AgentState` has it. events: the latest, the oldest of them first.

    session: the task's id. at: milliseconds of Redis' clock. number: of the last event there is. done, intents: keys of
    the checkpoint. in_flight: keys of steps that had begun and not ended. unread: messages in the inbox. waiting: what
    for, where the state does not say.
    """
    parsed = [parse_event(found) for found in events]
    plan = _parts(OpenStep, state.get("plan"))
    status = {one.get("key"): one.get("status") for one in _objects(state.get("plan"))}
    finished = [step.key for step in plan if status.get(step.key) == "done"]
    begun = [step for step in plan if status.get(step.key) == "running"]
    known = {step.key for step in plan}
    begun += [OpenStep(key=key) for key in sorted(set(in_flight)) if key not in known]
    steps = [key for key in done if not _is_told(key)]
    waits = _parts(AwaitedAnswer, [state.get("waiting_for")]) or ([waiting] if waiting is not None else [])
    return Handoff(
        task=task,
        agent=agent,
        session=session,
        why=why,
        detail=detail,
        at=at,
        events=number,
        to=to,
        goal=_text(state.get("goal")),
        message=message,
        summary=_summary(state, parsed),
        steps=max(len(steps), len(finished)),
        last_completed=next((key for key in reversed(status) if status[key] == "done"), None)
        or _last_completed(parsed),
        in_progress=tuple(begun),
        pending=tuple(step for step in plan if status.get(step.key) == "pending"),
        decisions=tuple(_parts(MadeDecision, state.get("decisions"))[-_LATEST:]),
        discoveries=tuple(_parts(FoundFact, state.get("discoveries"))[-_LATEST:]),
        attention=tuple(_attention(plan, status, parsed)),
        waiting_on=tuple(waits),
        artifacts=tuple(_text(one.get("name")) for one in _objects(state.get("artifacts"))),
        dependencies=Dependencies(
            tools=_tools(parsed),
            in_doubt=tuple(DoubtfulStep(key=key, idempotency_key=f"{session}:{key}") for key in sorted(intents)),
            unread=unread,
        ),
    )


def _is_told(key: str) -> bool:
    """Whether a record is that of something told (`#decided`, `read/#discovered#2`), which is no step."""
    return key.rpartition("/")[2].startswith("#")


def _last_completed(events: Sequence[Event]) -> str | None:
    for event in reversed(events):
        if event.type == "step_completed" and event.step is not None:
            return event.step
        if event.type == "tool_called":
            return _text(getattr(event, "tool", None))
    return None


def _attention(plan: Sequence[OpenStep], status: Mapping[Any, Any], events: Sequence[Event]) -> Iterable[str]:
    for step in plan:
        if status.get(step.key) == "failed":
            yield f"step {step.key} failed{f': {step.error}' if step.error else ''}"
    failure = next((one for one in reversed(events) if one.type in ("attempt_failed", "buried")), None)
    if failure is not None:
        yield f"the last error: {getattr(failure, 'error', '')}: {getattr(failure, 'message', '')}"
    for event in events:
        if event.type == "incoherent":
            yield f"incoherent ({getattr(event, 'check', '')}): {getattr(event, 'detail', '')}"


def _tools(events: Sequence[Event]) -> tuple[ToolUse, ...]:
    called = Counter(_text(getattr(event, "tool", None)) for event in events if event.type == "tool_called")
    return tuple(ToolUse(tool=tool, calls=calls) for tool, calls in called.most_common())


def _summary(state: Mapping[str, Any], events: Sequence[Event]) -> str:
    """What somebody has summed up already: of the end, of the conversation so far."""
    for event in reversed(events):
        if event.type in ("finished", "compacted") and (told := _text(getattr(event, "summary", None))):
            return told
    summaries = [one for one in _objects(state.get("messages")) if one.get("name") == "summary"]
    return _text(summaries[-1].get("content")) if summaries else ""


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, of a state that its user may have given another form."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list | tuple) else []


def _parts(kind: type[P], value: Any) -> list[P]:
    found = []
    for one in _objects(value):
        try:
            found.append(kind.model_validate(one))
        except ValidationError:
            continue
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
