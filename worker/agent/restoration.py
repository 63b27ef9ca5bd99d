"""Restoration of an agent's state from the latest snapshot and the events after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ...queues.delivery.checkpoint import History
from ...queues.event_log import TaskEvent, read_last_events
from ..durable.run import Run
from ..errors import BadSnapshot
from ..journal.json_patch import BadPatch
from ..journal.parsing import Unreadable, parse_event
from ..journal.reducer import empty_state, reduce
from ..journal.snapshot import BLOB, SNAPSHOT, StoredState, decode_snapshot

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
        gap: the first and the last number of the events that are missing, or follow from missing ones; None if the log
            is complete.
    """

    state: dict[str, Any]
    number: int
    since: int
    started: bool
    gap: tuple[int, int] | None = None


async def restore(run: Run, agent: str) -> Restored:
    """Return the state that earlier runs left. The cost is bounded by the events since the last snapshot.

    If an event after the snapshot is missing, it is the state before that event: Redis has lost data, or an entry of
    the log was deleted.

    Raises `BadSnapshot` if the snapshot or an event after it cannot be read; nothing is changed then.
    """
    snapshot = _snapshot(run.history, run.id, agent)
    state, number, started = (empty_state(), 0, False) if snapshot is None else (snapshot.state, snapshot.number, True)
    last, missing, found = -1, 0, list[TaskEvent]()
    while last != (latest := max(run.events, run.history.events)):  # an event may be logged during the read
        await run.flush()
        last, (found, missing) = latest, await _events_after(run, number, latest)
    for event in found:
        typed = parse_event(event)
        if isinstance(typed, Unreadable):
            raise BadSnapshot(run.id, str(typed))
        try:
            state = reduce(state, typed, event.number or 0)
        except BadPatch as error:
            raise BadSnapshot(run.id, str(error)) from None
        started = started or typed.type == "started"
    return Restored(state, last, len(found), started, (missing, last) if missing <= last else None)


def _snapshot(history: History, task_id: str, agent: str) -> StoredState | None:
    data = history.saved.get(SNAPSHOT)
    if data is None:
        return None
    blobs = {key: value for key, value in history.saved.items() if key.startswith(BLOB)}
    return decode_snapshot(task_id, data, blobs, owner=agent)


async def _events_after(run: Run, number: int, last: int) -> tuple[list[TaskEvent], int]:
    """Return the events from `number + 1` on in order, without those before a fresh replay, and the next number."""
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
                return _in_order(wanted, number + 1)
            elif event.type == "replayed" and isinstance(event.data, dict) and event.data.get("fresh"):
                return _in_order(wanted, wanted[-1].number or 0 if wanted else last + 1)
        if len(chunk) < most:
            break
        before = chunk[-1].id
    return _in_order(wanted, number + 1)


def _in_order(found: list[TaskEvent], first: int) -> tuple[list[TaskEvent], int]:
    """Return events that were read newest first in their order, up to the first missing one, and its number."""
    found.reverse()
    complete = [event for number, event in enumerate(found, first) if event.number == number]
    return complete, first + len(complete)
