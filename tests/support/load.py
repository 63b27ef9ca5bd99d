"""Load for queues whose servers fail: tasks enqueued, tasks acknowledged, and their outcomes.

The counts are kept outside Redis: ids are noted before they are enqueued, and handlers write to a file.

A task counts as acknowledged when `enqueue(durability="replicated")` returned. Replication is asynchronous: writes that
only a primary has are lost when it dies. Every replica that may be promoted must acknowledge: of two replicas, the one
that is not promoted continues to acknowledge for the former primary.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from perdure import NotReplicated, Producer, State, TaskHandle, TaskNotFound
from perdure.queues import QueueError

from tests.support.servers.nodes import BOUND, Node

_LONG: Final = "long"
"""Prefix of the ids of long runs."""


@dataclass(frozen=True)
class Run:
    """One run of one handler. Times in seconds of the machine's monotonic clock; finished is None if it was cut off."""

    pid: int
    started: float
    finished: float | None


@dataclass
class Journal:
    """Journal that the handlers write."""

    path: Path

    def runs(self) -> dict[str, list[Run]]:
        """Return the runs of each task, in the order in which they started."""
        found: dict[str, list[Run]] = {}
        for line in self.path.read_text().splitlines():
            pid, what, nanoseconds, task_id = line.split(" ")
            at = int(nanoseconds) / 1e9
            runs = found.setdefault(task_id, [])
            if what == "start":
                runs.append(Run(int(pid), at, None))
            elif what == "finish":
                position = max(index for index, run in enumerate(runs) if run.pid == int(pid))
                runs[position] = Run(int(pid), runs[position].started, at)
        return found

    def steps_run_again(self) -> int:
        """Return the number of tasks whose step ran again after a run had its record."""
        recorded: set[str] = set()
        again: set[str] = set()
        for line in self.path.read_text().splitlines():
            _, what, _, task_id = line.split(" ")
            if what == "recorded":
                recorded.add(task_id)
            elif what == "half" and task_id in recorded:
                again.add(task_id)
        return len(again)


@dataclass(frozen=True)
class Fault:
    """A time in which these queues had no server, in seconds of the monotonic clock."""

    entered: float
    over: float
    queues: frozenset[str]


@dataclass(frozen=True)
class Figures:
    """Outcomes of all tasks."""

    enqueued: int
    returned: int
    acknowledged: int
    finished: int
    lost: int
    """Acknowledged, and not finished."""
    vanished: int
    """The handle was returned, the replicas were not known to have it, and it is gone: what WAIT is for."""
    waiters: int
    """Calls of `result()` that began at once and got their answer."""
    waited: int
    """Such calls, all of them."""
    run_twice: int
    """Tasks that were run more than once."""
    unexplained: int
    """Those without a crash in their record."""
    enqueue_pause: float
    """Seconds that the slowest `enqueue` took, repetitions of the caller's included."""
    work_pause: float
    """Seconds between two starts of tasks, at most."""
    pause_elsewhere: float | None
    """The same during faults, of queues on servers that had none; None where there are no others."""
    long_runs: int
    """Runs that started before a fault and take longer than a lease."""
    long_run_twice: int
    """Those started again because their lease was not renewed in time."""
    steps_run_again: int
    """Tasks whose step was run once more though its record was known."""
    redirections: dict[str, int] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """Return name and value of each figure as text."""
        rows = [
            ("enqueued", f"{self.enqueued:,}"),
            ("handle returned", f"{self.returned:,}"),
            ("acknowledged", f"{self.acknowledged:,}"),
            ("finished", f"{self.finished:,}"),
            ("acknowledged and lost", f"{self.lost:,}"),
            ("not acknowledged and lost", f"{self.vanished:,}"),
            ("waiters answered", f"{self.waiters:,} of {self.waited:,}"),
            ("run twice", f"{self.run_twice:,}"),
            ("run twice without a crash", f"{self.unexplained:,}"),
            ("runs longer than a lease", f"{self.long_runs:,}"),
            ("of them run twice", f"{self.long_run_twice:,}"),
            ("recorded steps run again", f"{self.steps_run_again:,}"),
            ("longest pause of enqueue", f"{self.enqueue_pause:.2f} s"),
            ("longest pause of work", f"{self.work_pause:.2f} s"),
        ]
        if self.pause_elsewhere is not None:
            rows.append(("longest pause of work elsewhere", f"{self.pause_elsewhere:.2f} s"))
        return rows + [(f"{name} replies", f"{count:,}") for name, count in self.redirections.items()]


@dataclass
class Load:
    """Producers that enqueue until `stop` is called, and waiters for some of their tasks."""

    producer: Producer
    queues: Sequence[str]
    journal: Journal
    rate: float = 150.0
    """Tasks per second of all producers together. Each queue has two: one without a server holds up no other."""
    pause: float = 0.02
    """Seconds that each handler takes."""
    waited_for: int = 5
    """Every n-th task has a waiter for its result from the beginning."""
    enqueued: int = 0
    returned: dict[str, TaskHandle[Any]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    slowest: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    _waiters: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Enqueue until `stop`; calls in progress are completed."""
        async with asyncio.TaskGroup() as group:
            for number, queue in enumerate([*self.queues, *self.queues]):
                group.create_task(self._produce(number, queue))

    def stop(self) -> None:
        self._stop.set()

    async def _produce(self, number: int, queue: str) -> None:
        turn = 0
        while not self._stop.is_set():
            entered = time.monotonic()
            await self._one(f"{number}-{turn}", queue)
            turn += 1
            left = 2 * len(self.queues) / self.rate - (time.monotonic() - entered)
            await asyncio.sleep(max(0.0, left))

    async def begin_long(self, pause: float) -> None:
        """Enqueue a task of that many seconds on each queue."""
        for queue in self.queues:
            await self._one(f"{_LONG}-{self.enqueued}", queue, pause)

    async def _one(self, task_id: str, queue: str, pause: float | None = None) -> None:
        """Enqueue one task under one id until it is stored, as a caller does that must not lose it."""
        self.enqueued += 1
        args = {"pause": self.pause if pause is None else pause}
        entered = time.monotonic()
        while True:
            try:
                handle, confirmed = await self._enqueue(task_id, queue, args)
            except QueueError:
                if time.monotonic() - entered > BOUND:
                    raise
                await asyncio.sleep(0.05)
                continue
            break
        self.slowest = max(self.slowest, time.monotonic() - entered)
        self.returned[task_id] = handle
        if confirmed:
            self.acknowledged.add(task_id)
            if len(self.acknowledged) % self.waited_for == 0:
                self._waiters[task_id] = asyncio.create_task(handle.result())

    async def _enqueue(self, task_id: str, queue: str, args: dict[str, float]) -> tuple[TaskHandle[Any], bool]:
        """Enqueue; returns whether the replicas are known to have it as well."""
        try:
            return await self.producer.enqueue(
                "carry", args, queue=queue, task_id=task_id, durability="replicated"
            ), True
        except NotReplicated:
            return await self.producer.enqueue("carry", args, queue=queue, task_id=task_id), False

    async def figures(self, redirections: dict[str, int] | None = None) -> Figures:
        """Wait until all that was acknowledged is finished, and count."""
        lost = await self._unfinished(self.acknowledged)
        vanished = await self._unfinished(self.returned.keys() - self.acknowledged)
        answered = await self._answers()
        runs = {task_id: found for task_id, found in self.journal.runs().items() if task_id in self.returned}
        twice = [task_id for task_id, found in runs.items() if len(found) > 1]
        records = [await self.returned[task_id].record() for task_id in twice if task_id not in vanished | lost]
        return Figures(
            enqueued=self.enqueued,
            returned=len(self.returned),
            acknowledged=len(self.acknowledged),
            finished=len(self.returned) - len(lost) - len(vanished),
            lost=len(lost),
            vanished=len(vanished),
            waiters=answered,
            waited=len(self._waiters),
            run_twice=len(twice),
            unexplained=sum(record.crashes == 0 for record in records),
            enqueue_pause=self.slowest,
            work_pause=longest_gap([run.started for found in runs.values() for run in found]),
            pause_elsewhere=self._pause_elsewhere(runs),
            long_runs=sum(task_id.startswith(_LONG) for task_id in runs),
            long_run_twice=sum(task_id.startswith(_LONG) for task_id in twice),
            steps_run_again=self.journal.steps_run_again(),
            redirections=redirections or {},
        )

    def _pause_elsewhere(self, runs: Mapping[str, Sequence[Run]]) -> float | None:
        pauses: list[float] = []
        for fault in self.faults:
            starts = [fault.entered, fault.over]
            for task_id, found in runs.items():
                if self.returned[task_id].partition.queue not in fault.queues:
                    starts += [run.started for run in found if fault.entered < run.started < fault.over]
            if len(self.queues) > len(fault.queues):
                pauses.append(longest_gap(starts))
        return max(pauses, default=None)

    async def _unfinished(self, task_ids: set[str]) -> set[str]:
        """Return the tasks that have no result within the bound."""
        left = set(task_ids)
        deadline = time.monotonic() + BOUND
        while left and time.monotonic() < deadline:
            gone = set()
            for task_id in sorted(left):
                try:
                    if await self.returned[task_id].status() is State.SUCCEEDED:
                        left.discard(task_id)
                except TaskNotFound:
                    gone.add(task_id)
            if left == gone:
                break
            await asyncio.sleep(0.05)
        return left

    async def _answers(self) -> int:
        """Return the number of waiters that got the right result within the bound."""
        if not self._waiters:
            return 0
        await asyncio.wait(self._waiters.values(), timeout=BOUND)
        answers = 0
        for task_id, waiter in self._waiters.items():
            if not waiter.done():
                waiter.cancel()
            elif waiter.exception() is None and waiter.result() == task_id:
                answers += 1
        await asyncio.gather(*self._waiters.values(), return_exceptions=True)
        return answers


def longest_gap(times: Sequence[float]) -> float:
    """Return the longest time between two consecutive times."""
    return max(later - earlier for earlier, later in pairwise(sorted(times)))


def redirections(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the number of redirections and TRYAGAIN replies of the living nodes."""
    counts: Counter[str] = Counter({"MOVED": 0, "ASK": 0, "TRYAGAIN": 0})
    for node in nodes:
        for name, value in node.info("errorstats").items():
            error = name.removeprefix("errorstat_")
            if error in counts:
                counts[error] += int(value.removeprefix("count="))
    return dict(counts)
