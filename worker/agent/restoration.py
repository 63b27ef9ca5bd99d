"""From the checkpoint and the log to the state: the snapshot, and the events after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ...queues import History, TaskEvent, read_last_events
from ..durable import Run
from ..errors import BadSnapshot
from ..journal import (
    BLOB,
    SNAPSHOT,
    BadPatch,
    StoredState,
    Unreadable,
    decode_snapshot,
    empty_state,
    parse_event,
    reduce,
)

__all__ = ["Restored", "restore"]

_CHUNK: Final = 200
"""Entries of the log that are read at once, at most."""

_BESIDES: Final = 10
"""Entries without a number among them that are reckoned with."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state as JSON, as the last event left it. number: of that event. since: how many came after the snapshot.
    begun: whether the agent was started at all.
    """

    state: dict[str, Any]
    number: int
    since: int
    begun: bool


async def restore(run: Run, agent: str) -> Restored:
    """What former runs left. What reading costs is bounded by the events since the last snapshot.

    Raises `BadSnapshot` where the snapshot or an event after it cannot be read; both are left as they are.
    """
    snapshot = _snapshot(run.history, run.id, agent)
    state, number, begun = (empty_state(), 0, False) if snapshot is None else (snapshot.state, snapshot.number, True)
    last, found = -1, list[TaskEvent]()
    while last != (told := max(run.events, run.history.events)):  # what was told meanwhile, as of a notice, counts too
        await run.flush()
        last, found = told, await _events_after(run, number, told)
    for event in found:
        typed = parse_event(event)
        if isinstance(typed, Unreadable):
            raise BadSnapshot(run.id, str(typed))
        try:
            state = reduce(state, typed, event.number or 0)
        except BadPatch as error:
            raise BadSnapshot(run.id, str(error)) from None
        begun = begun or typed.type == "started"
    return Restored(state, last, len(found), begun)


def _snapshot(history: History, task_id: str, agent: str) -> StoredState | None:
    data = history.saved.get(SNAPSHOT)
    if data is None:
        return None
    blobs = {key: value for key, value in history.saved.items() if key.startswith(BLOB)}
    found = decode_snapshot(task_id, data, blobs)
    if found.agent != agent:
        raise BadSnapshot(task_id, f"it is that of agent {found.agent!r}, and {agent!r} was to go on from it")
    return found


async def _events_after(run: Run, number: int, last: int) -> list[TaskEvent]:
    """The events `number + 1` to `last`, oldest first; of those, only what came after a fresh start."""
    wanted: list[TaskEvent] = []
    before: str | None = None
    while last > number:
        most = min(_CHUNK, last - number - len(wanted) + _BESIDES)
        chunk = await read_last_events(run.gateway, run.delivery.partition, run.id, most, before=before)
        for event in chunk:
            if event.number is not None and event.number > last:
                continue  # it was told since this began
            if event.number is not None and event.number > number:
                wanted.append(event)
            elif event.number is not None:
                return _complete(run.id, wanted, number + 1, last)
            elif event.type == "replayed" and isinstance(event.data, dict) and event.data.get("fresh"):
                return _complete(run.id, wanted, last - len(wanted) + 1, last)
        if len(chunk) < most:
            break
        before = chunk[-1].id
    return _complete(run.id, wanted, number + 1, last)


def _complete(task_id: str, found: list[TaskEvent], first: int, last: int) -> list[TaskEvent]:
    """What was read newest first, in its order. Raises `BadSnapshot` where one is missing."""
    found.reverse()
    numbers = [event.number for event in found]
    if numbers != list(range(first, last + 1)):
        missing = next(number for number in range(first, last + 2) if number not in numbers)
        raise BadSnapshot(task_id, f"event {missing} is not in its log")
    return found
