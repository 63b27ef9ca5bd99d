"""Which events of which tasks are meant, and what they come to in numbers."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...queues import Gateway, Partition, Producer, State, TaskEvent, list_tasks, read_last_events, walk_events

__all__ = ["Statistics", "Wanted", "events_of_tasks", "last_events", "last_of"]

_PAGE: Final = 200
"""Events that are read together."""

_TASKS: Final = 100
"""Tasks that are asked together whether they have a log."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events are meant; what is empty does not matter. since: milliseconds of Redis' clock.

    step: the one of this key, and those within it.
    """

    types: Sequence[str] = ()
    step: str | None = None
    tool: str | None = None
    since: int = 0

    @property
    def after(self) -> str:
        """The event id after which they begin."""
        return f"{self.since - 1}-{2**64 - 1}" if self.since > 0 else "0-0"

    def matches(self, event: TaskEvent) -> bool:
        data = event.data if isinstance(event.data, dict) else {}
        return (
            event.at >= self.since
            and (not self.types or event.type in self.types)
            and (self.step is None or event.step == self.step or (event.step or "").startswith(f"{self.step}/"))
            and self.tool in (None, data.get("tool"))
        )


async def last_events(
    gateway: Gateway, partition: Partition, task_id: str, wanted: Wanted, count: int
) -> list[TaskEvent]:
    """The last so many that match, the oldest first; read from the end."""
    found: list[TaskEvent] = []
    before: str | None = None
    while True:
        page = await read_last_events(gateway, partition, task_id, _PAGE, before=before)
        found += [event for event in page if wanted.matches(event)][: count - len(found)]
        if len(page) < _PAGE or len(found) == count or page[-1].at < wanted.since:
            return found[::-1]
        before = page[-1].id


async def events_of_tasks(
    producer: Producer, wanted: Wanted, *, queue: str | None, states: Sequence[State], task: str | None
) -> AsyncIterator[TaskEvent]:
    """Matching events of all tasks that are meant, task by task: a page of one log is in memory at a time."""
    some: list[tuple[Partition, str]] = []
    tasks = list_tasks(producer.gateway, producer.namespace, queue=queue, states=states, task=task)
    async for record in tasks:
        some.append((producer.namespace.partition(record.queue, record.partition), record.id))
        if len(some) == _TASKS:
            async for event in _events_of(producer.gateway, some, wanted):
                yield event
            some.clear()
    async for event in _events_of(producer.gateway, some, wanted):
        yield event


async def _events_of(
    gateway: Gateway, tasks: Sequence[tuple[Partition, str]], wanted: Wanted
) -> AsyncIterator[TaskEvent]:
    lengths = await gateway.pipeline([("XLEN", partition.log(task_id)) for partition, task_id in tasks])
    for (partition, task_id), length in zip(tasks, lengths, strict=True):
        if length:
            async for event in walk_events(gateway, partition, task_id, after=wanted.after):
                if wanted.matches(event):
                    yield event


async def last_of(events: AsyncIterator[TaskEvent], count: int) -> list[TaskEvent]:
    """The latest so many, in the order of time."""
    latest: list[tuple[int, int, str, int, TaskEvent]] = []
    number = 0
    async for event in events:
        number += 1
        at, _, within = event.id.partition("-")
        heapq.heappush(latest, (int(at), int(within), event.task_id, number, event))
        if len(latest) > count:
            heapq.heappop(latest)
    return [one[-1] for one in sorted(latest)]


_FAILURES: Final = ("step_failed", "attempt_failed", "crashed", "crash_backoff", "buried")
_SHOWN: Final = 10
"""Decisions that are shown."""


@dataclass(slots=True)
class Statistics:
    """What events come to: how many there are of each type, which tools were used and how often they failed, where it
    failed last, and the latest decisions.
    """

    tasks: set[str] = field(default_factory=set)
    types: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    failed_last: TaskEvent | None = None
    failed_step: TaskEvent | None = None
    decisions: deque[TaskEvent] = field(default_factory=lambda: deque(maxlen=_SHOWN))

    def count(self, event: TaskEvent) -> None:
        data = event.data if isinstance(event.data, dict) else {}
        self.tasks.add(event.task_id)
        self.types[event.type] += 1
        self.unreadable += event.problem is not None
        tool = data.get("tool")
        if event.type == "tool_called" and isinstance(tool, str):
            self.calls[tool] += 1
        if event.type == "step_failed":
            self.steps[event.step or "?"] += 1
            self.failed_step = _later(self.failed_step, event)
            if isinstance(tool, str):
                self.calls[tool] += 1
                self.failures[tool] += 1
        if event.type in _FAILURES:
            self.failed_last = _later(self.failed_last, event)
        if event.type == "decided":
            self.decisions.append(event)

    def summary(self) -> dict[str, Any]:
        """The numbers as plain data, the most frequent first."""
        return {
            "tasks": len(self.tasks),
            "events": self.types.total(),
            "unreadable": self.unreadable,
            "types": dict(self.types.most_common()),
            "tools": [
                {"tool": name, "calls": count, "failures": self.failures[name]}
                for name, count in self.calls.most_common()
            ],
            "failed_steps": dict(self.steps.most_common()),
            "failed_last": _plain(self.failed_last),
            "failed_step": _plain(self.failed_step),
            "decisions": [_plain(event) for event in self.decisions],
        }


def _later(one: TaskEvent | None, other: TaskEvent) -> TaskEvent:
    return other if one is None or other.at >= one.at else one


def _plain(event: TaskEvent | None) -> dict[str, Any] | None:
    return None if event is None else {"task_id": event.task_id} | event.summary()
