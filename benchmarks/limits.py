"""`python -m benchmarks.limits`: what limits cost, how soon a released token starts the next task, and who has a turn.

Fairness: one tenant has many tasks waiting, nine have ten each, and all share a limit by tenant. Cost: the rate of
no-op tasks with one keyed limit that never blocks, beside the same without one, in turns; and of tasks without a limit
in an app that declares one. Release: two workers run tasks of a limit of one, one after the other; the latency is from
the end of a handler to the first line of the next one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Annotated, Any, Final

import hiredis
import redis
import typer
from perdure import Context, PerdureError, Worker
from perdure.worker.log import configure_logging

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import Child, started
from .support.server import NoServer, own_server, server_line

_KINDS: Final = {
    "plain": "without limits",
    "declared": "without one, in an app that declares a limit",
    "limited": "with one keyed limit that does not block",
}
_CONCURRENCY: Final = 32
_TENANTS: Final = 9
_TASKS_OF_EACH: Final = 10
_BATCH: Final = 5_000
_REPORTED_WITHIN: Final = 30.0
_WARM_UP: Final = 20


@dataclass(frozen=True, slots=True)
class Turns:
    """Fairness. large: how many tasks of the large tenant had started when the last of the others started."""

    large: int
    seconds: float
    enqueued: float
    rate: float


async def turns(deployment: Deployment, waiting: int) -> Turns:
    """Let one tenant have so many tasks waiting, and nine others ten; run them until those of the nine have started."""
    app, order = deployment.app(), list[str]()
    shared = app.limit("shared", running=2, total=20, by="tenant")
    done = asyncio.Event()

    @app.task(limits=[shared], queue="bench")
    async def served(ctx: Context, tenant: str) -> None:
        order.append(tenant)
        if len(order) - order.count("large") == _TENANTS * _TASKS_OF_EACH:
            done.set()

    async with app:
        begin = time.perf_counter()
        for start in range(0, waiting, _BATCH):
            count = min(_BATCH, waiting - start)
            await served.enqueue_many({"tenant": "large"} for _ in range(count))
        enqueued = waiting / (time.perf_counter() - begin)
        for number in range(_TENANTS):
            await served.enqueue_many({"tenant": f"small-{number}"} for _ in range(_TASKS_OF_EACH))
        async with Worker(app, concurrency=_CONCURRENCY) as worker:
            begin = time.perf_counter()
            working = asyncio.create_task(worker.run())
            await done.wait()
            took, large = time.perf_counter() - begin, order.count("large")
            await asyncio.sleep(1.0)
            rate = len(order) / (time.perf_counter() - begin)
            worker.stop()
            await working
    return Turns(large, took, enqueued, rate)


async def rate_of(deployment: Deployment, count: int, kind: str) -> float:
    """Return no-op tasks per second. kind: `plain`, `declared` (a limit that they do not use), or `limited`."""
    app = deployment.app()
    limits = [] if kind == "plain" else [app.limit("by_tenant", running=1_000, by="tenant")]
    options: dict[str, Any] = {"limits": limits} if kind == "limited" else {}

    @app.task(queue="bench", **options)
    async def noop(ctx: Context, tenant: int) -> int:
        return tenant

    if kind == "declared":

        @app.task(queue="bench", limits=limits)
        async def other(ctx: Context, tenant: int) -> int:
            return tenant

    async with app:
        await noop.enqueue_many({"tenant": number % 100} for number in range(count))
        async with Worker(app, concurrency=_CONCURRENCY) as worker:
            begin = time.perf_counter()
            await worker.run(burst=True)
            return count / (time.perf_counter() - begin)


async def costs(deployment: Deployment, count: int, rounds: int) -> dict[str, list[float]]:
    """Return the rates of each kind of task, measured in turns."""
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(rounds):
        for kind, rates in found.items():
            here = deployment.within(f"cost-{kind}-{number}")
            rates.append(await rate_of(here, count, kind))
            here.purge()
    return found


async def releases(deployment: Deployment, count: int) -> list[float]:
    """Return the milliseconds from the end of each handler to the first line of the next one, in one of two workers."""
    spans: list[tuple[float, float]] = []

    async def listen(child: Child) -> None:
        while True:
            began = await child.reported(_REPORTED_WITHIN)
            spans.append((began, await child.reported(_REPORTED_WITHIN)))

    module = "benchmarks.support.limit_process"
    async with started(module, deployment) as one, started(module, deployment) as other:
        app = deployment.app()
        alone = app.limit("alone", total=1)

        @app.task(limits=[alone], queue="bench")
        async def serial(ctx: Context) -> None: ...

        async with app:
            await serial.enqueue_many({} for _ in range(_WARM_UP + count))
        listening = [asyncio.create_task(listen(child)) for child in (one, other)]
        async with asyncio.timeout(_REPORTED_WITHIN + count):
            while len(spans) < _WARM_UP + count:  # noqa: ASYNC110 - the children report
                await asyncio.sleep(0.05)
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
    spans.sort()
    return [(later[0] - earlier[1]) * 1000 for earlier, later in pairwise(spans)][_WARM_UP:]


def main(
    waiting: Annotated[int, typer.Option(help="Waiting tasks of the large tenant.")] = 100_000,
    tasks: Annotated[int, typer.Option(help="No-op tasks of a round.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds with and without a limit, in turns.")] = 3,
    released: Annotated[int, typer.Option(help="Tasks that run one after the other.")] = 1_000,
    quick: Annotated[bool, typer.Option("--quick", help="Few tasks, to try the program.")] = False,
) -> None:
    """Measure fairness, the cost of a limit that does not block, and the time from a release to the next start."""
    configure_logging("ERROR")
    if quick:
        waiting, tasks, rounds, released = 500, 300, 1, 50
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
            _show_costs(run(costs(deployment.within("cost"), tasks, rounds)))
            late = quantiles(run(releases(deployment.within("release"), released)), n=100, method="inclusive")
            print(f"release to next start, limit of 1, two workers: p50 {late[49]:.1f} ms, p99 {late[98]:.1f} ms")
            fair = run(turns(deployment.within("turns"), waiting))
            print(
                f"one tenant with {waiting:,} waiting, {_TENANTS} with {_TASKS_OF_EACH}: these had all started "
                f"after {fair.seconds:.2f} s and {fair.large:,} tasks of the large one; {fair.rate:,.0f} tasks/s, "
                f"enqueued at {fair.enqueued:,.0f} tasks/s"
            )
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _show_costs(rates: dict[str, list[float]]) -> None:
    median = {kind: statistics.median(found) for kind, found in rates.items()}
    for kind, what in _KINDS.items():
        ratio = statistics.median(found / plain for found, plain in zip(rates[kind], rates["plain"], strict=True))
        print(f"no-op tasks {what}: {median[kind]:,.0f} tasks/s, {ratio:.2f} of those without")


if __name__ == "__main__":
    typer.run(main)
