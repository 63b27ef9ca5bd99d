"""The event log and the streams of a task as one sequence of events, by time.

The order is that of the milliseconds of Redis' clock; within one, events of the log come first, then items by the name
of their stream and their number. It is the same for each reader at any time: a read begins with TIME, and leaves what
was stored since then to the next one, so that nothing which belongs before an event appears after it. If Redis' clock
was set back, an item has the time of the one before it in its stream, and a reader that follows gets it late.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from .event_log import TaskEvent, opened_events
from .keys import Partition
from .stream_items import check_stream, entry_id, stream_names
from .streams import StreamItem, opened_items
from .transport.gateway import Gateway
from .transport.scripts import milliseconds

EMITTED: Final = "emitted"
"""Type of the event of an item."""

_PAGE: Final = 50
"""Entries of each key that are read at once: each may be as large as the payload limit."""

_SETTLING_MS: Final = 1000
"""A time further ahead of Redis' clock than this is no present one: the clock was set back."""

_ID: Final = re.compile(r"([0-9]{1,16})-([0-9]{1,20})(?:@(.+))?", re.DOTALL)


class EventPlace(NamedTuple):
    """Place of an event in the sequence. stream: "" for the log. number: of the item, or within the millisecond."""

    at: int
    stream: str
    number: int


def event_place(event_id: str) -> EventPlace:
    """Return the place of the event that has an id. Raises `ValueError` for any other text."""
    found = _ID.fullmatch(event_id)
    if found is None or int(found[2]) >= 2**64:
        raise ValueError(f"after must be the id of an event, got {event_id!r}")
    return EventPlace(int(found[1]), "" if found[3] is None else check_stream(found[3]), int(found[2]))


class MergedEvents:
    """A reader of the log and of all streams of a task.

    Attributes:
        streams: keys of the streams that the task had at the last read.
    """

    def __init__(self, gateway: Gateway, partition: Partition, task_id: str, after: str) -> None:
        """after: id of the event after which it starts. Raises `ValueError` for any other text."""
        self._start = start = event_place(after)
        self._gateway, self._partition, self._task_id = gateway, partition, task_id
        number = 2**64 - 1 if start.stream else start.number
        self._log = f"{start.at}-{number}"  # id of the last event of the log that was taken
        self._last: dict[str, EventPlace] = {}  # places of the last items that were taken, by stream
        self.streams: frozenset[str] = frozenset()

    async def read(self) -> tuple[list[TaskEvent], bool]:
        """Return the next events, and whether there may be more that were stored before this call."""
        record = self._partition.record(self._task_id)
        names = stream_names(await self._gateway.command("HGET", record, "streams"))
        keys = [self._partition.stream(self._task_id, name) for name in names]
        self.streams = frozenset(keys)
        last = [self._last.get(name, EventPlace(0, name, 0)) for name in names]
        time, log, *streams = await self._gateway.pipeline(
            [
                ("TIME",),
                ("XRANGE", self._partition.log(self._task_id), f"({self._log}", "+", "COUNT", _PAGE),
                *(
                    ("XRANGE", key, entry_id(place.number + 1), "+", "COUNT", _PAGE)
                    for place, key in zip(last, keys, strict=True)
                ),
            ],
            node_of=record,
        )
        cipher = self._gateway.encryptor.of(self._partition, self._task_id)
        parts = [[(_log_place(event), event) for event in opened_events(log, self._task_id, cipher)]]
        for place, entries in zip(last, streams, strict=True):
            parts.append([*_placed(opened_items(entries, place.stream, self._task_id, cipher), place.at)])
        full = [part[-1][0] for part in parts if len(part) == _PAGE]
        now = milliseconds(time)
        taken, found = list[TaskEvent](), sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])
        for place, event in found:
            if now <= place.at < now + _SETTLING_MS:
                if not taken:
                    await asyncio.sleep((place.at + 1 - now) / 1000)
                return taken, True
            if full and place > min(full):
                return taken, True
            if place.stream:
                self._last[place.stream] = place
            else:
                self._log = event.id
            if place > self._start:
                taken.append(event)
        return taken, bool(full)


def _log_place(event: TaskEvent) -> EventPlace:
    return EventPlace(event.at, "", int(event.id.partition("-")[2]))


def _placed(items: Sequence[StreamItem], at: int) -> Iterator[tuple[EventPlace, TaskEvent]]:
    """Yield events of items with their places. at: time of the item before them, which none of them precedes."""
    for item in items:
        at = max(at, item.at)
        data: dict[str, Any] = {"stream": item.stream, "cursor": item.cursor, "kind": item.kind}
        if item.kind == "cut_off":
            data |= {"attempt": item.attempt, "reason": item.reason}
        else:
            data |= {"value": item.value}
        identity = f"{at}-{item.cursor}@{item.stream}"
        event = TaskEvent(identity, at, EMITTED, item.step, data, problem=item.problem, task_id=item.task_id)
        yield EventPlace(at, item.stream, int(item.cursor)), event
