"""`perdure task events`: events of one task or of many, filtered, and their statistics."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import typer

from ....queues.durations import PointInTime
from ....queues.event_log import TaskEvent, read_last_events, walk_events
from ....queues.inspection.views import task_logs
from ....queues.keys import Partition
from ....queues.producer import Producer
from ....queues.records import State, read_tasks
from ....queues.transport.gateway import Gateway
from ...agents.journal import agent_events as _agent_events  # noqa: F401 - the log may have them
from ...durable.journal.parsing import Unreadable, parse_event
from ..support.connection import TaskOptions, connected_as_tenant, known_partitions, redis_now, where
from ..support.errors import Misuse
from ..support.events_text import describe_event
from ..support.options import QueueOption, TaskNameOption, read_task_id, read_time
from ..support.output import Part, StderrText, ago, table
from ..support.runner import Output, line

_PAGE: Final = 200
"""Events per read."""

_TASKS: Final = 100
"""Tasks per round trip that reads the lengths of their logs."""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Filter of events. Empty fields match everything.

    Args:
        step: Key of a step; matches that step and the steps within it.
        since: Milliseconds of Redis' clock.
    """

    types: Sequence[str] = ()
    step: str | None = None
    tool: str | None = None
    since: int = 0

    @property
    def after(self) -> str:
        """The event id before the first possible match."""
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
    gateway: Gateway, partition: Partition, task_id: str, wanted: EventFilter, count: int
) -> list[TaskEvent]:
    """Return the last `count` matching events, the oldest first. Reads the log backwards."""
    found: list[TaskEvent] = []
    before: str | None = None
    while True:
        page = await read_last_events(gateway, partition, task_id, _PAGE, before=before)
        found += [event for event in page if wanted.matches(event)][: count - len(found)]
        if len(page) < _PAGE or len(found) == count or page[-1].at < wanted.since:
            return found[::-1]
        before = page[-1].id


async def events_of_tasks(
    producer: Producer, wanted: EventFilter, *, queue: str | None, states: Sequence[State], task: str | None
) -> AsyncIterator[TaskEvent]:
    """Yield the matching events of tasks, task by task, with one page of one log in memory.

    Tasks without events cost a share of a SCAN, and those without events since the wanted time one read of many.
    """
    known: set[tuple[Partition, str]] = set()  # SCAN may find a log twice
    some: list[tuple[Partition, str]] = []
    async for place in task_logs(producer.gateway, producer.namespace, queue):
        if place in known:
            continue
        known.add(place)
        some.append(place)
        if len(some) == _TASKS:
            async for event in _events_of(producer.gateway, some, wanted, states, task):
                yield event
            some.clear()
    async for event in _events_of(producer.gateway, some, wanted, states, task):
        yield event


async def _events_of(
    gateway: Gateway,
    tasks: Sequence[tuple[Partition, str]],
    wanted: EventFilter,
    states: Sequence[State],
    task: str | None,
) -> AsyncIterator[TaskEvent]:
    newest = await gateway.pipeline(
        [("XREVRANGE", partition.log(task_id), "+", "-", "COUNT", 1) for partition, task_id in tasks]
    )
    recent = [
        place
        for place, entries in zip(tasks, newest, strict=True)
        if entries and int(entries[0][0].partition(b"-")[0]) >= wanted.since
    ]
    for partition, task_id in await _of_tasks(gateway, recent, states, task):
        async for event in walk_events(gateway, partition, task_id, after=wanted.after):
            if wanted.matches(event):
                yield event


async def _of_tasks(
    gateway: Gateway, places: Sequence[tuple[Partition, str]], states: Sequence[State], task: str | None
) -> Sequence[tuple[Partition, str]]:
    """Return those whose task is in one of the states and has the name."""
    if not states and task is None:
        return places
    found: list[tuple[Partition, str]] = []
    for partition in dict.fromkeys(partition for partition, _ in places):
        ids = [task_id for where, task_id in places if where == partition]
        records = [record for record in await read_tasks(gateway, partition, ids) if record is not None]
        found += [
            (partition, record.id)
            for record in records
            if (not states or record.state in states) and task in (None, record.task)
        ]
    return found


async def last_of(events: AsyncIterator[TaskEvent], count: int) -> list[TaskEvent]:
    """Return the latest `count` events, in the order of time."""
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
_DECISIONS: Final = 10
"""Latest decisions that the statistics keep."""


@dataclass(slots=True)
class Statistics:
    """Statistics of events: counts per type, calls and failures per tool, the latest failure and decisions."""

    tasks: set[str] = field(default_factory=set)
    types: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    failed_last: TaskEvent | None = None
    failed_step: TaskEvent | None = None
    decisions: deque[TaskEvent] = field(default_factory=lambda: deque(maxlen=_DECISIONS))

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
        """Return the statistics as plain data, the most frequent first."""
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


@connected_as_tenant
async def events(
    producer: Producer,
    task_id: Annotated[
        str | None, typer.Argument(metavar="ID", parser=read_task_id, help="Id of the task. Default: all tasks.")
    ] = None,
    *,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only events of this type. Repeatable.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only events of this step and of the steps within it.")
    ] = None,
    tool: Annotated[str | None, typer.Option(metavar="NAME", help="Only calls of this tool.")] = None,
    since: Annotated[
        PointInTime | None,
        typer.Option(
            metavar="TIME", parser=read_time, help="Only events since then: 15m, 2h or 3d before now, or an ISO time."
        ),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Print only the last N events.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Print only the first N events.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for further events until the task ends.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print only statistics: types, tools, failures, decisions.")
    ] = False,
    queue: QueueOption = None,
    state: Annotated[list[State] | None, typer.Option(help="Only tasks in this state. Repeatable.")] = None,
    task_name: TaskNameOption = None,
) -> AsyncIterator[Output]:
    """Print the events of a task, or of the tasks of a queue, the oldest first.

    Use it to see what a task did and why. Without an ID, events are printed
    task by task; with --last, the last events of all tasks. Long values are
    cut; --json prints them in full, one object per line.

    Example: perdure task events 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --follow

    Example: perdure task events --queue research --since 1h --stats
    """
    if last is not None and limit is not None:
        raise Misuse("give only one of --last (the newest events) and --limit (the oldest)")
    if stats and (last is not None or limit is not None or follow):
        raise Misuse("--stats counts all matching events: omit --last, --limit and --follow; use --since")
    wanted = EventFilter(types or (), step, tool, 0 if since is None else max(0, since.at(await redis_now(producer))))
    if task_id is not None:
        if state or task_name:
            raise Misuse("give either an ID, or --state and --task")
        found = _of_one(producer, task_id, queue, wanted, last, follow=follow)
    elif follow:
        raise Misuse("--follow needs the ID of a task")
    else:
        found = _of_many(producer, wanted, last, queue, state or [], task_name)
    if stats:
        statistics = Statistics()
        async for event in _checked(found):
            statistics.count(event)
        yield _shown(statistics, await redis_now(producer))
        return
    printed = 0
    async for event in _checked(found):
        summary = event.summary() if task_id else {"task_id": event.task_id} | event.summary()
        yield line(summary, describe_event(event, of_many=task_id is None))
        printed += 1
        if printed == limit:
            break
    if not printed:
        nothing = f"no matching events {where(producer) if task_id is None else f'of task {task_id}'}"
        yield Output((), StderrText(nothing), lines=True)


async def _checked(found: AsyncIterator[TaskEvent]) -> AsyncIterator[TaskEvent]:
    """Add the problem to events that this version cannot interpret."""
    async for event in found:
        typed = parse_event(event)
        yield replace(event, problem=typed.problem) if isinstance(typed, Unreadable) else event


async def _of_one(
    producer: Producer, task_id: str, queue: str | None, wanted: EventFilter, last: int | None, *, follow: bool
) -> AsyncIterator[TaskEvent]:
    handle = await TaskOptions(task_id, queue).find(producer)
    after = wanted.after
    if last is not None:
        for event in await last_events(producer.gateway, handle.partition, task_id, wanted, last):
            after = event.id
            yield event
        if not follow:
            return
    async for event in handle.events(follow=follow, after=after):
        if wanted.matches(event):
            yield event


async def _of_many(
    producer: Producer, wanted: EventFilter, last: int | None, queue: str | None, states: list[State], task: str | None
) -> AsyncIterator[TaskEvent]:
    await known_partitions(producer, queue)
    found = events_of_tasks(producer, wanted, queue=queue, states=states, task=task)
    if last is None:
        async for event in found:
            yield event
    else:
        for event in await last_of(found, last):
            yield event


def _shown(statistics: Statistics, now: int) -> Output:
    since, several = ago(now), len(statistics.tasks) > 1
    tools = [(name, calls, statistics.failures[name]) for name, calls in statistics.calls.most_common()]
    parts: list[Part] = [
        {
            "tasks": len(statistics.tasks),
            "events": statistics.types.total(),
            "cannot be read": statistics.unreadable or None,
            "failed last": _failure(statistics.failed_last, since),
            "failed step": _failure(statistics.failed_step, since),
        }
    ]
    if statistics.types:
        parts += ["", table(("type", "events#"), statistics.types.most_common())]
    if tools:
        parts += ["", table(("tool", "calls#", "failures#"), tools)]
    if statistics.decisions:
        parts += ["\nlatest decisions", *(describe_event(event, of_many=several) for event in statistics.decisions)]
    return Output(statistics.summary(), *parts)


def _failure(event: TaskEvent | None, since: Any) -> str | None:
    if event is None:
        return None
    data = event.data if isinstance(event.data, dict) else {}
    step = f" in step {event.step or data['step']}" if event.step or data.get("step") else ""
    what = ": ".join(str(data[name]) for name in ("error", "message", "how") if data.get(name))
    return f"{event.type}{step}, task {event.task_id}, {since(event.at)}: {' '.join(what.split())}"
