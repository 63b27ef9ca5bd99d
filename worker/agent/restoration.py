"""Restoration of an agent's state from the latest snapshot and the events after it."""

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
"""Most log entries read at once."""

_UNNUMBERED: Final = 10
"""Log entries without a number that a read allows for."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of an agent after its last event, as JSON.

    Attributes:
        number: the number of that event.
        since: how many events were applied to the snapshot.
        started: whether an earlier run started the agent.
    """

    state: dict[str, Any]
    number: int
    since: int
    started: bool


async def restore(run: Run, agent: str) -> Restored:
    """Return the state that earlier runs left. The cost is bounded by the events since the last snapshot.

    Raises `BadSnapshot` if the snapshot or an event after it cannot be read; nothing is changed then.
    """
    snapshot = _snapshot(run.history, run.id, agent)
    state, number, started = (empty_state(), 0, False) if snapshot is None else (snapshot.state, snapshot.number, True)
    last, found = -1, list[TaskEvent]()
    while last != (latest := max(run.events, run.history.events)):  # an event may be logged during the read
        await run.flush()
        last, found = latest, await _events_after(run, number, latest)
    for event in found:
        typed = parse_event(event)
        if isinstance(typed, Unreadable):
            raise BadSnapshot(run.id, str(typed))
        try:
            state = reduce(state, typed, event.number or 0)
        except BadPatch as error:
            raise BadSnapshot(run.id, str(error)) from None
        started = started or typed.type == "started"
    return Restored(state, last, len(found), started)


def _snapshot(history: History, task_id: str, agent: str) -> StoredState | None:
    data = history.saved.get(SNAPSHOT)
    if data is None:
        return None
    blobs = {key: value for key, value in history.saved.items() if key.startswith(BLOB)}
    found = decode_snapshot(task_id, data, blobs)
    if found.agent != agent:
        raise BadSnapshot(task_id, f"it belongs to agent {found.agent!r}, not to {agent!r}")
    return found


async def _events_after(run: Run, number: int, last: int) -> list[TaskEvent]:
    """Return the events `number + 1` to `last` in order, without those before a fresh replay."""
    wanted: list[TaskEvent] = []
    before: str | None = None
    while last > number:
        most = min(_CHUNK, last - number - len(wanted) + _UNNUMBERED)
        chunk = await read_last_events(run.gateway, run.delivery.partition, run.id, most, before=before)
        for event in chunk:
            if event.number is not None and event.number > last:
                continue  # logged after this read started
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
    """Return events that were read newest first in their order. Raises `BadSnapshot` if one is missing."""
    found.reverse()
    numbers = [event.number for event in found]
    if numbers != list(range(first, last + 1)):
        missing = next(number for number in range(first, last + 2) if number not in numbers)
        raise BadSnapshot(task_id, f"event {missing} is not in its log")
    return found
