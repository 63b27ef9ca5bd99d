"""`python -m benchmarks.streams`: the latency from an item to its readers, beside a raw client with XREAD.

Three scenes: one task that emits fast, in a worker of another process; many readers of one such task; and many readers
of as many tasks, whose streams another process writes as a worker does. The raw readers block in XREAD, each on its own
connection. The latency is from the call that emits to the reader's loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Annotated, Any, Final

import hiredis
import redis
import redis.asyncio
import typer
from perdure import PerdureError, Producer, TaskHandle
from perdure.queues import Partition
from perdure.worker.log import configure_logging

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import started
from .support.server import NoServer, own_server, server_line

_ENDED_WITHIN: Final = 300.0
_JOINED_WITHIN: Final = 60.0


@dataclass(slots=True)
class Outcome:
    """Figures of one scene. latencies: in milliseconds. cpu: share of a core that the readers' process used."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    connections: int = 0

    def line(self, name: str) -> str:
        late = quantiles(self.latencies, n=100, method="inclusive")
        rate = len(self.latencies) / self.seconds
        return (
            f"{name}: {rate:,.0f} items/s read, p50 {late[49]:.1f} ms, p99 {late[98]:.1f} ms, "
            f"{self.cpu:.0%} of a core, {self.connections:,} connections"
        )


@asynccontextmanager
async def _metered(outcome: Outcome) -> AsyncIterator[None]:
    started_at, used = time.monotonic(), time.process_time()
    yield
    outcome.seconds = time.monotonic() - started_at
    outcome.cpu = (time.process_time() - used) / outcome.seconds


async def _read(handle: TaskHandle[object], outcome: Outcome, expected: int) -> None:
    found = outcome.latencies.append
    async for item in handle.stream("times"):
        if item.kind != "item":
            return
        found((time.monotonic() - item.value) * 1000)
        if item.cursor == str(expected):
            return


async def _read_raw(client: redis.asyncio.Redis, key: str, outcome: Outcome, expected: int) -> None:
    last, found = "0", outcome.latencies.append
    number = 0
    while number < expected:
        fetched: Any = await client.xread({key: last}, block=5_000)
        for _, entries in fetched or ():
            for entry, fields in entries:
                found((time.monotonic() - float(fields[b"d"])) * 1000)
                last = entry
                number += 1


async def emitted(deployment: Deployment, readers: int, items: int, rate: float, *, raw: bool) -> Outcome:
    """Read one task's stream with so many readers, while a worker runs the task."""
    outcome = Outcome()
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment),
    ):
        arguments = {"items": items, "rate": rate}
        handle = await producer.enqueue("speak", arguments, queue="bench", task_id="t0", delay=1.0)
        handles = [handle] * readers
        await _measure(deployment, producer, handles, outcome, items, raw=raw)
    return outcome


async def written(deployment: Deployment, streams: int, rate: float, seconds: float, *, raw: bool) -> Outcome:
    """Read so many streams, each with one reader."""
    outcome = Outcome()
    async with Producer(deployment.url, namespace=deployment.namespace) as producer:
        ids = [f"t{number}" for number in range(streams)]
        handles = await asyncio.gather(*(producer.enqueue("idle", task_id=name, queue="bench") for name in ids))
        expected = round(rate * seconds)

        async def write() -> None:
            arguments = (str(streams), str(rate), str(seconds))
            async with started("benchmarks.support.stream_process", deployment, *arguments) as child:
                await child.reported(_ENDED_WITHIN)

        await _measure(deployment, producer, handles, outcome, expected, raw=raw, meanwhile=write)
    return outcome


async def _measure(
    deployment: Deployment,
    producer: Producer,
    handles: Sequence[TaskHandle[object]],
    outcome: Outcome,
    expected: int,
    *,
    raw: bool,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> None:
    # its default time-out would end a blocking read
    options: Any = {"max_connections": len(handles) + 1, "protocol": 2, "socket_timeout": None}
    client = redis.asyncio.Redis.from_url(deployment.url, **options)
    partition = Partition(deployment.namespace, "bench", 0)
    if raw:
        reading = [
            asyncio.ensure_future(_read_raw(client, partition.stream(handle.id, "times"), outcome, expected))
            for handle in handles
        ]
    else:
        reading = [asyncio.ensure_future(_read(handle, outcome, expected)) for handle in handles]
    try:
        await asyncio.sleep(min(_JOINED_WITHIN, 0.5 + len(handles) / 2_000))
        outcome.connections = len(await client.client_list())
        async with asyncio.timeout(_ENDED_WITHIN), _metered(outcome):
            await asyncio.gather(*reading, *([meanwhile()] if meanwhile else []))
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await client.aclose()


def main(
    readers: Annotated[int, typer.Option(help="Readers, and streams in the last scene.")] = 1_000,
    seconds: Annotated[float, typer.Option(help="Seconds of a scene.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="Few readers, to try the program.")] = False,
) -> None:
    """Measure the latency of items of one fast task, of one with 1,000 readers, and of 1,000 streams."""
    configure_logging("ERROR")
    if quick:
        readers, seconds = 20, 1.0
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
            for raw in (False, True):
                name = "raw client" if raw else "perdure"
                fast = run(emitted(deployment.within(f"fast{raw}"), 1, round(2_000 * seconds), 2_000, raw=raw))
                print(fast.line(f"{name}, one task with 2,000 items/s, one reader"))
                shared = run(emitted(deployment.within(f"one{raw}"), readers, round(10 * seconds), 10, raw=raw))
                print(shared.line(f"{name}, one task with 10 items/s, {readers:,} readers"))
                many = run(written(deployment.within(f"many{raw}"), readers, 10, seconds, raw=raw))
                print(many.line(f"{name}, {readers:,} tasks with 10 items/s each, a reader of each"))
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
