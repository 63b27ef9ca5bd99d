"""`perdure bench`: throughput, latency and recovery on the user's server, beside bare commands in the same run.

The limits are measured in the same run with redis-py, because absolute numbers depend on the machine. Everything is
written to a temporary namespace, which is removed also after an error or Ctrl-C.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import anyio
import typer
from redis.crc import key_slot

from ...queues.envelope import Envelope, new_task_id
from ...queues.keys import GROUP, Partition
from ...queues.transport.clients import COMMAND_TIMEOUT, sync_client, translated
from ...queues.transport.cluster.topology import discover_topology
from ...queues.transport.gateway import Gateway
from ..app import App
from ..context import Context
from ..log import configure_process_log
from ..runtime.worker import Worker
from .support.connection import ConnectionOptions
from .support.errors import Misuse
from .support.output import note, table
from .support.runner import Output, command
from .support.temporary import run_interruptible, temporary_namespace


@command
def bench(
    place: ConnectionOptions,
    *,
    tasks: Annotated[
        int, typer.Option(min=100, max=1_000_000, metavar="N", help="Number of tasks per measurement.")
    ] = 10_000,
    payload: Annotated[
        int, typer.Option(min=0, max=500_000, metavar="BYTES", help="Size of each task's argument.")
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Put load on a server that is not the embedded one.")] = False,
) -> Output:
    """Measure Perdure on your server, beside bare commands of redis-py.

    Takes about 20 seconds, in a temporary namespace, which is removed at
    the end, also after Ctrl-C. Any server but the embedded one needs --yes,
    because the load slows down its other clients.

    Example: perdure bench --tasks 20000 --payload 1000
    """
    configure_process_log("ERROR")
    address = place.producer().address
    if not (yes or address.embedded):
        raise Misuse(
            f"could not measure {address.shown}: this puts it under load for about 20 seconds; add --yes to agree"
        )
    note(f"measuring {address.shown}")
    rows = run_interruptible(partial(measure, place.overrides(), tasks, payload))
    shown = [
        (row.what, row.unit, *map(_number, (row.value, row.limit, row.value / row.limit)), row.commands) for row in rows
    ]
    return Output(
        {"server": address.shown, "tasks": tasks, "payload": payload, "rows": rows},
        table(("what", "unit", "Perdure#", "redis-py#", "ratio#", "what redis-py does"), shown),
    )


def _number(value: float) -> str:
    """Three significant digits, and thousands in groups."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


_ROOM: Final = 32
"""Concurrency of the worker, and number of tasks that record steps."""

_PICK_UPS: Final = 300
_LEASE: Final = 2.0
_KEPT_FOR: Final = 600.0
"""Seconds that outcomes are kept if this process is killed before it removes them."""

_Command = tuple[str | bytes | int, ...]

app = App("bench")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. limit: what redis-py reaches with these commands."""

    key: str
    what: str
    unit: str
    value: float
    limit: float
    commands: str


@app.task(queue=app.name)
async def noop(ctx: Context, data: str) -> float:
    """Return when the handler started."""
    return time.perf_counter()


@app.task(queue=app.name)
async def walk(ctx: Context, steps: int) -> None:
    """Record steps one after the other."""
    for number in range(steps):
        await ctx.step("step", _echo, number)


async def _echo(number: int) -> int:
    return number


async def measure(settings: Mapping[str, object], tasks: int, payload: int) -> list[Row]:
    """Take all measures in a temporary namespace. Raises `Unavailable`, `Refused`."""
    kept: dict[str, object] = {"result_ttl": _KEPT_FOR, "dead_letter_ttl": _KEPT_FOR, "lease": _LEASE}
    async with temporary_namespace(app, app.name, **settings, **kept) as namespace:
        partition, data = namespace.partition(app.name), "x" * payload
        adds, reads, records, trips = _limits(app.producer.gateway, partition, data, tasks)
        enqueued, worked = await _throughput(data, tasks)
        steps, latencies, recovery = await _steps(tasks), await _latencies(), await _recovery(partition)
    trip = "XADD + XREADGROUP, 1 a trip"
    return [
        Row("enqueue", "enqueue, one bulk call", "tasks/s", enqueued, adds, "XADD, 500 a trip"),
        Row("tasks", f"no-op tasks, {_ROOM} at once", "tasks/s", worked, reads, "XREADGROUP + XACK + XDEL, 100 a trip"),
        Row("steps", f"durable steps, {_ROOM} tasks", "steps/s", steps, records, f"HSET + XADD, {_ROOM} a trip"),
        Row("latency_p50", "enqueue to start, p50", "ms", _ms(latencies, 50), _ms(trips, 50), trip),
        Row("latency_p99", "enqueue to start, p99", "ms", _ms(latencies, 99), _ms(trips, 99), trip),
        Row("recovery", "lost worker, until its task runs", "s", recovery, _LEASE, "none: the lease"),
    ]


async def _throughput(data: str, count: int) -> tuple[float, float]:
    """Return the tasks per second that are enqueued, and that a worker runs."""
    started = time.perf_counter()
    await noop.enqueue_many({"data": data} for _ in range(count))
    enqueued = time.perf_counter()
    async with Worker(app, concurrency=_ROOM) as worker:
        await worker.run(burst=True)
    return count / (enqueued - started), count / (time.perf_counter() - enqueued)


async def _steps(count: int) -> float:
    """Return the steps per second that several tasks record at the same time."""
    each = count // _ROOM
    async with _working():
        started = time.perf_counter()
        for handle in await walk.enqueue_many({"steps": each} for _ in range(_ROOM)):
            await handle.result()
        return each * _ROOM / (time.perf_counter() - started)


async def _latencies() -> list[float]:
    """Return the seconds from the call that enqueues to the start of the handler, in an idle worker."""
    found = []
    async with _working():
        for _ in range(_PICK_UPS):
            sent = time.perf_counter()
            found.append(await (await noop.enqueue("")).result() - sent)
    return found


async def _recovery(partition: Partition) -> float:
    """Return the seconds from the last sign of a worker until another one runs its task.

    To the server, a consumer that reads a message and never renews its lease is a killed worker.
    """
    handle = await noop.enqueue("")
    read = ("XREADGROUP", "GROUP", GROUP, "lost", "COUNT", 1, "STREAMS", partition.ready, ">")
    lost = time.perf_counter()
    await app.producer.gateway.command(*read, repeatable=False)
    async with _working():
        return await handle.result() - lost


@asynccontextmanager
async def _working() -> AsyncIterator[None]:
    async with Worker(app, concurrency=_ROOM) as worker, anyio.create_task_group() as group:
        group.start_soon(worker.run)
        yield
        worker.stop()


def _limits(gateway: Gateway, raw: Partition, data: str, count: int) -> tuple[float, float, float, list[float]]:
    """Return the bare client's messages added, messages read and steps per second, and the seconds of round trips."""
    stream, steps, log = raw.log("raw-messages"), raw.steps("raw"), raw.log("raw")
    fields = ("env", Envelope(id=new_task_id(), task="noop").encode(), "args", f'{{"data":"{data}"}}'.encode())
    read = ("XREADGROUP", "GROUP", "raw", "raw", "COUNT", 100, "STREAMS", stream, ">")
    with _bare_client(gateway, stream) as run:
        run([("XGROUP", "CREATE", stream, "raw", "0", "MKSTREAM")])
        adds = [run([("XADD", stream, one, *fields) for one in ids]) for ids in _ids(count, 500)]
        reads = [run([read, ("XACK", stream, "raw", *ids), ("XDEL", stream, *ids)]) for ids in _ids(count, 100)]
        records = [
            run(part for one in ids for part in (("HSET", steps, one, "value"), ("XADD", log, "*", "step", one)))
            for ids in _ids(count, _ROOM)
        ]
        trips = [run([("XADD", stream, "*", *fields), read]) for _ in range(_PICK_UPS)]
    return count / sum(adds), count / sum(reads), count / sum(records), trips


@contextmanager
def _bare_client(gateway: Gateway, key: str) -> Iterator[Callable[[Iterable[_Command]], float]]:
    """Yield a function that executes commands in one round trip and returns its seconds.

    It connects to the server, in a cluster to the node that serves the key. Raises `Unavailable`, `Refused`.
    """
    address, node = gateway.address, None
    with translated(address.shown):
        if address.clustered:
            node = discover_topology(address, address.nodes, timeout=COMMAND_TIMEOUT).serving(key_slot(key.encode()))
        with closing(sync_client(address, gateway.socket, node=node)) as client:

            def run(commands: Iterable[_Command]) -> float:
                pipeline = client.pipeline(transaction=False)
                started = time.perf_counter()
                for command in commands:
                    pipeline.execute_command(*command)
                pipeline.execute()
                return time.perf_counter() - started

            yield run


def _ids(count: int, size: int) -> Iterator[list[str]]:
    for at in range(0, count, size):
        yield [f"1-{number}" for number in range(at + 1, min(at + size, count) + 1)]


def _ms(seconds: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1000
