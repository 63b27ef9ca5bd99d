"""The measures of `perdure bench`. Rates are per second, latencies in milliseconds."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import anyio

from ....queues import Envelope, Partition, new_task_id
from ...app import App
from ...durable import Context
from ...runtime import Worker
from .raw import Command, RawClient, raw_client

__all__ = ["Row", "app", "measure"]

_AT_ONCE: Final = 32
"""Producers that enqueue at the same time, and tasks that run at the same time."""

_ADDED, _READ = 500, 100
"""Messages that the raw client adds and reads in one round trip."""

_PICK_UPS: Final = 300
_PICK_UP_TIME: Final = 3.0
"""Seconds after which no more latencies are taken: a far server gets fewer of them."""

_ENDED_WITHIN: Final = 60.0

app = App("bench")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. raw: what the raw client reaches with the commands in `does`."""

    key: str
    what: str
    unit: str
    value: float
    raw: float
    does: str


@app.task
async def noop(ctx: Context, data: str) -> None:
    """Nothing."""


@app.task
async def pick_up(ctx: Context) -> float:
    """Return when the handler started."""
    return time.perf_counter()


@app.task(durability="sync")
async def walk(ctx: Context, steps: int) -> tuple[float, float]:
    """Record steps one after the other; return when the first started and the last ended."""
    started = time.perf_counter()
    for number in range(steps):
        await ctx.step("step", _echo, number)
    return started, time.perf_counter()


async def _echo(number: int) -> int:
    return number


async def measure(raw: Partition, tasks: int, payload: int) -> list[Row]:
    """Take all measures, in the order of the report. raw: partition of the raw client."""
    with raw_client(app.producer.gateway, raw.ready) as client:
        adds, reads, records, trips = _limits(client, raw, "x" * payload, tasks)
    by_calls, at_once = await _enqueue("x" * payload, tasks // 2)
    async with Worker(app, concurrency=_AT_ONCE) as worker:
        started = time.perf_counter()
        await worker.run(burst=True)
        worked = tasks // 2 * 2 / (time.perf_counter() - started)
    steps, latencies = await _steps(tasks), await _latencies()
    add, read = f"XADD, {_ADDED} a trip", f"XREADGROUP + XACK + XDEL, {_READ} a trip"
    record, trip = f"HSET + XADD, {_AT_ONCE} a trip", "XADD + XREADGROUP, 1 a trip"
    return [
        Row("enqueue", f"enqueue, {_AT_ONCE} coroutines", "tasks/s", by_calls, adds, add),
        Row("enqueue_many", "enqueue, one bulk call", "tasks/s", at_once, adds, add),
        Row("tasks", f"no-op tasks, one worker, concurrency {_AT_ONCE}", "tasks/s", worked, reads, read),
        Row("steps", f"durable steps, {_AT_ONCE} tasks", "steps/s", steps, records, record),
        *(
            Row(f"latency_p{p}", f"enqueue to start, p{p}", "ms", _ms(latencies, p), _ms(trips, p), trip)
            for p in (50, 95, 99)
        ),
    ]


async def _enqueue(data: str, count: int) -> tuple[float, float]:
    """Return the tasks per second of awaited calls, and of one call for all."""
    numbers = iter(range(count))

    async def produce() -> None:
        for _ in numbers:
            await noop.enqueue(data)

    started = time.perf_counter()
    async with anyio.create_task_group() as producers:
        for _ in range(_AT_ONCE):
            producers.start_soon(produce)
    ended = time.perf_counter()
    await noop.enqueue_many({"data": data} for _ in range(count))
    return count / (ended - started), count / (time.perf_counter() - ended)


async def _steps(count: int) -> float:
    """Return the steps per second that several tasks record at the same time."""
    each = count // _AT_ONCE
    handles = await walk.enqueue_many({"steps": each} for _ in range(_AT_ONCE))
    async with Worker(app, concurrency=_AT_ONCE) as worker:
        await worker.run(burst=True)
    spans = [await handle.result(timeout=_ENDED_WITHIN) for handle in handles]
    return each * _AT_ONCE / (max(end for _, end in spans) - min(begin for begin, _ in spans))


async def _latencies() -> list[float]:
    """Return the seconds from the call that enqueues to the start of the handler, in an idle worker."""
    found = []
    async with Worker(app, concurrency=_AT_ONCE) as worker:
        running = asyncio.create_task(worker.run())
        try:
            for _ in _repeated():
                sent = time.perf_counter()
                handle = await pick_up.enqueue()
                found.append(await handle.result(timeout=_ENDED_WITHIN) - sent)
        finally:
            worker.stop()
            await running
    return found


def _limits(client: RawClient, raw: Partition, data: str, count: int) -> tuple[float, float, float, list[float]]:
    """Return the raw client's messages added, messages read and steps per second, and the seconds of round trips."""
    stream, steps, log = raw.ready, raw.steps("raw"), raw.log("raw")
    fields = ("env", Envelope(id=new_task_id(), task="noop").encode(), "args", f'{{"data":"{data}"}}'.encode())
    read = ("XREADGROUP", "GROUP", "raw", "raw", "COUNT", _READ, "STREAMS", stream, ">")
    ids = [f"1-{number}" for number in range(1, count + 1)]
    client.pipeline([("XGROUP", "CREATE", stream, "raw", "0", "MKSTREAM")])
    adds = _timed(client, ([("XADD", stream, one, *fields) for one in some] for some in _split(ids, _ADDED)))
    reads = _timed(
        client, ([read, ("XACK", stream, "raw", *some), ("XDEL", stream, *some)] for some in _split(ids, _READ))
    )
    records = _timed(
        client,
        (
            [command for one in some for command in (("HSET", steps, one, "value"), ("XADD", log, "*", "step", one))]
            for some in _split(ids, _AT_ONCE)
        ),
    )
    trips = _timed(client, ([("XADD", stream, "*", *fields), read] for _ in _repeated()))
    return count / sum(adds), count / sum(reads), count / sum(records), trips


def _repeated() -> Iterator[int]:
    """Count latencies: up to `_PICK_UPS`, for `_PICK_UP_TIME`, but at least two."""
    until = time.perf_counter() + _PICK_UP_TIME
    return (number for number in range(_PICK_UPS) if number < 2 or time.perf_counter() < until)


def _timed(client: RawClient, trips: Iterable[list[Command]]) -> list[float]:
    """Return the seconds that each round trip took."""
    found = []
    for commands in trips:
        started = time.perf_counter()
        client.pipeline(commands)
        found.append(time.perf_counter() - started)
    return found


def _split(ids: list[str], size: int) -> Iterable[list[str]]:
    return (ids[at : at + size] for at in range(0, len(ids), size))


def _ms(seconds: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1000
