"""Many workers on one server: the server's cost of tasks and of idle workers, and the distribution of tasks."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from perdure import Producer

from ..support.deployment import Deployment
from ..support.processes import Child, started
from ..support.usage import Meter, Usage

__all__ = ["FULL", "QUICK", "Crew", "Effort", "measure_crew"]

_SETTLED_IN: Final = 4.0
"""Seconds until the start-up work of the workers is over."""

_QUIET = "quiet"
"""A queue without workers."""

_ENDED_WITHIN: Final = 120.0


@dataclass(frozen=True, slots=True)
class Crew:
    """A number of processes with `each` workers of a given concurrency."""

    name: str
    processes: int
    each: int
    concurrency: int

    @property
    def workers(self) -> int:
        return self.processes * self.each


@dataclass(frozen=True, slots=True)
class Effort:
    """The size of a run. idle: seconds that idle workers are observed. tasks: no-op tasks. singles: tasks sent one by
    one to idle workers. due: tasks with the same due time. steps: durable steps. held: seconds that a task is held.
    """

    idle: float
    tasks: int
    singles: int
    due: int
    steps: int
    held: float


FULL: Final = Effort(idle=10.0, tasks=30_000, singles=500, due=500, steps=6_400, held=8.0)
QUICK: Final = Effort(idle=0.5, tasks=200, singles=10, due=20, steps=64, held=1.0)


@dataclass(slots=True)
class _Bench:
    deployment: Deployment
    crew: Crew
    effort: Effort
    producer: Producer
    found: dict[str, float] = field(default_factory=dict)
    idle: Usage | None = None

    def worked(self, spent: Usage) -> Usage:
        """Return the usage without that of idle workers."""
        return spent if self.idle is None else spent.beyond(self.idle)

    async def until_done(self) -> None:
        """Wait until the queue and the due set are empty."""
        partition = self.producer.namespace.partition("bench")
        commands = [("XLEN", partition.ready), ("ZCARD", partition.due)]
        async with asyncio.timeout(_ENDED_WITHIN):
            while any(await self.producer.gateway.pipeline(commands)):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)


async def measure_crew(deployment: Deployment, crew: Crew, effort: Effort) -> dict[str, float]:
    """Return the figures by key; `scale.LINES` describes them."""
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        _working(deployment, crew) as children,
    ):
        bench = _Bench(deployment, crew, effort, producer)
        await asyncio.sleep(_SETTLED_IN if effort is FULL else 0.0)
        for phase in (_idle, _singles, _due, _held, _load, _steps):
            await phase(bench)
        await _fairness(bench, children)
    return bench.found


@asynccontextmanager
async def _working(deployment: Deployment, crew: Crew) -> AsyncIterator[Sequence[Child]]:
    async with AsyncExitStack() as stack:
        starting = (
            stack.enter_async_context(
                started("benchmarks.scale.many_workers", deployment, str(crew.each), str(crew.concurrency))
            )
            for _ in range(crew.processes)
        )
        yield await asyncio.gather(*starting)


async def _idle(bench: _Bench) -> None:
    meter = Meter(bench.deployment)
    await asyncio.sleep(bench.effort.idle)
    bench.idle = spent = meter.read()
    bench.found |= {
        "idle_load": spent.load * 100,
        "idle_commands": sum(spent.calls.values()) / spent.seconds / bench.crew.workers,
        "idle_micros": spent.load * 1e6 / bench.crew.workers,
        "connections": spent.clients / bench.crew.workers,
    }


async def _singles(bench: _Bench) -> None:
    """Send tasks one after the other. Reads that idle workers repeat by time-out do not count as wake-ups."""
    count = bench.effort.singles
    meter = Meter(bench.deployment)
    for number in range(count):
        await bench.producer.enqueue("noop", {"number": number}, queue="bench")
        await bench.until_done()
    spent = bench.worked(meter.read())
    bench.found |= {"wake_ups": spent.calls["xreadgroup"] / count, "single_micros": spent.cpu * 1e6 / count}


async def _due(bench: _Bench) -> None:
    """Measure tasks with one due time while all workers are idle."""
    count = bench.effort.due
    await bench.producer.enqueue_many("noop", ({"number": number} for number in range(count)), delay=1.0, queue="bench")
    meter = Meter(bench.deployment)
    await bench.until_done()
    spent = meter.read()
    bench.found["promotions"] = spent.calls["zscore"] / count - 1  # the script of its outcome calls it once


async def _held(bench: _Bench) -> None:
    """Measure lease renewals while each worker holds a task."""
    seconds = bench.effort.held
    await bench.producer.enqueue_many("hold", ({"seconds": seconds} for _ in range(bench.crew.workers)), queue="bench")
    await asyncio.sleep(seconds * 0.1)
    meter = Meter(bench.deployment)
    await asyncio.sleep(seconds * 0.7)
    spent = meter.read()
    beats = bench.worked(spent).per_second("evalsha")
    bench.found |= {"renewed": spent.per_second("xclaim"), "beats": max(0.0, beats)}
    await bench.until_done()


async def _load(bench: _Bench) -> None:
    """Run no-op tasks under full load. The cost of enqueueing alone is measured on a queue without workers."""
    count = bench.effort.tasks
    alone = Meter(bench.deployment)
    await bench.producer.enqueue_many("noop", ({"number": number} for number in range(count)), queue=_QUIET)
    enqueued = bench.worked(alone.read())
    meter, began = Meter(bench.deployment), time.monotonic()
    await bench.producer.enqueue_many("noop", ({"number": number} for number in range(count)), queue="bench")
    await bench.until_done()
    took, total = time.monotonic() - began, meter.read()
    spent = bench.worked(total)
    bench.found |= {
        "tasks_per_second": count / took,
        "load": total.load * 100,
        "task_micros": (spent.cpu - enqueued.cpu) * 1e6 / count,
        "enqueue_micros": enqueued.cpu * 1e6 / count,
        "task_commands": (sum(spent.calls.values()) - sum(enqueued.calls.values())) / count,
        "task_scripts": (spent.calls["evalsha"] - enqueued.calls["evalsha"]) / count,
        "task_reads": spent.calls["xreadgroup"] / count,
        "task_received": spent.received / count,
        "task_sent": spent.sent / count,
    }


async def _steps(bench: _Bench) -> None:
    """Measure durable steps of 32 concurrent tasks."""
    tasks = 32
    each = max(1, bench.effort.steps // tasks)
    meter = Meter(bench.deployment)
    await bench.producer.enqueue_many("walk", ({"steps": each} for _ in range(tasks)), queue="bench")
    await bench.until_done()
    spent = bench.worked(meter.read())
    bench.found |= {
        "step_micros": spent.cpu * 1e6 / (each * tasks),
        "step_received": spent.received / (each * tasks),
    }


async def _fairness(bench: _Bench, children: Sequence[Child]) -> None:
    """Measure the distribution of tasks over the workers and their memory, as the workers report them."""
    for child in children:
        child.send(signal.SIGTERM)
    reports = [json.loads(await child.line(_ENDED_WITHIN)) for child in children]
    settled = sorted(count for one in reports for count in one["settled"])
    bench.found |= {
        "least": settled[0],
        "median": statistics.median(settled),
        "most": settled[-1],
        "gini": _gini(settled),
        "memory": sum(one["memory"] for one in reports) / bench.crew.workers / 1e6,
    }


def _gini(values: Sequence[float]) -> float:
    """Return the Gini coefficient of ascending values: 0 if all are equal, near 1 if one has everything."""
    total, count = sum(values), len(values)
    weighted = sum(rank * value for rank, value in enumerate(values, 1))
    return 2 * weighted / (count * total) - (count + 1) / count
