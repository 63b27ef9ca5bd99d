"""`python -m benchmarks.parts`: CPU time of a no-op task and a step in the worker, part by part, in microseconds.

Each part runs many times in isolation, with a connection that replies immediately. The whole is a worker on a real
queue. Its remainder is the event loop, system calls, and caches that are warm in the isolated parts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Annotated, Any

import hiredis
import typer
from perdure import App, Context, Settings, Worker
from perdure.queues import Address, Gateway, Namespace
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.envelope import Envelope, new_task_id
from perdure.queues.security.encryption import Encryptor, step_chunks
from perdure.queues.transport.pipelining import Command
from perdure.queues.transport.scripts import pairs, queue_script
from perdure.worker.durable.run import Run
from perdure.worker.log import configure_logging
from perdure.worker.runtime.executor import Executor
from perdure.worker.runtime.quarantine_gate import QuarantineGate
from perdure.worker.runtime.shared_settings import SharedSettings
from perdure.worker.runtime.slots import Slots
from perdure.worker.task import Task
from rich.console import Console
from rich.table import Table

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.server import own_server

__all__ = ["parts", "totals"]

_ROUNDS = 5

app = App("parts", settings=Settings(redis_url="redis://unused"))


@app.task
async def noop(ctx: Context, number: int) -> int:
    return number


@app.task(durability="sync")
async def walk(ctx: Context, steps: int) -> None:
    for number in range(steps):
        await ctx.step("step", _echo, number)
    walked.append(steps)


walked: list[int] = []
"""Number of steps of each run of `walk` that came to its end."""


async def _echo(number: int) -> int:
    return number


class _InstantConnection:
    """A connection that replies immediately, to a script that writes a checkpoint with: accepted, no message."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._write = queue_script("write_checkpoint").sha

    def submit(self, command: Command) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        future.set_result([1, 0] if command[1] == self._write else 1)
        return future

    def flush(self) -> None: ...

    def reconnect(self) -> None: ...

    async def close(self) -> None: ...


async def _cpu(act: Callable[[], Awaitable[object]], count: int) -> float:
    """Return the microseconds of CPU of one of `count` repetitions that `act` makes, the median of several rounds."""
    found = []
    for _ in range(_ROUNDS):
        began = time.thread_time()
        await act()
        found.append((time.thread_time() - began) / count * 1e6)
    return median(found)


async def _plain(act: Callable[[], object], times: int) -> float:
    async def many() -> None:
        for _ in range(times):
            act()

    return await _cpu(many, times)


async def parts(times: int) -> list[tuple[str, float]]:
    """Return each part's name and its microseconds. times: how often it runs in one of the rounds."""
    partition = Namespace("parts").partition("default")
    data = Envelope(id=new_task_id(), task="noop").encode()
    fields = [b"env", data, b"args", b'{"number":12345}']
    gateway = Gateway(Address("redis://unused"))
    gateway._connection = _InstantConnection()
    leases: Leases[Run] = Leases()
    executor = Executor(
        gateway,
        app.tasks,
        app.settings,
        SharedSettings(app.settings),
        leases,
        Slots(1),
        QuarantineGate(None, window=30.0),
        threads=1,
    )
    deliveries = [Delivery(partition, b"%d-1" % n, "worker-host-1-abcdef", 1, pairs(fields)) for n in range(times)]
    steps = Envelope(id=new_task_id(), task="walk").encode()
    walking = Delivery(partition, b"1-1", "worker", 1, {b"env": steps, b"args": b'{"steps":%d}' % times})
    finish = ("EVALSHA", "0" * 40, 2, partition.ready, partition.record(new_task_id()), *map(str, range(16)))

    async def execute() -> None:
        for delivery in deliveries:
            await executor.execute(delivery)

    async def fill() -> None:
        slots = Slots(times)
        for _ in range(times):
            slots.fill(asyncio.sleep(0))
        await slots.wait_empty()

    async def walk_once() -> None:
        former = len(walked)
        await executor.execute(walking)
        if walked[former:] != [times]:
            raise RuntimeError("the task with steps did not come to its end")

    encryptor = Encryptor([bytes(32)])
    cipher = encryptor.of(partition, new_task_id())
    record = bytes(140)

    def read() -> Delivery:
        return Delivery(partition, b"1-1", "w", 1, pairs(fields))

    return [
        ("read: the message as a delivery", await _plain(read, times)),
        ("slot: an asyncio task, from start to end", await _cpu(fill, times)),
        ("run: from delivery to outcome", await _cpu(execute, times)),
        ("    of it: decode and check the envelope", await _plain(lambda: Envelope.decode(data), times)),
        ("    of it: decode and check the arguments", await _plain(lambda: noop.arguments.decode(fields[3]), times)),
        (
            "    of it: check and encode the result",
            await _plain(lambda: noop.result.encode("task", "noop", 12345), times),
        ),
        ("send: pack the outcome", await _plain(lambda: hiredis.pack_command(finish), times)),  # type: ignore[arg-type]  # the stub declares a tuple of one
        ("a durable step, from call to record", await _cpu(walk_once, times)),
        (
            "encrypt: 140 bytes, the first of a task",
            await _plain(lambda: encryptor.of(partition, new_task_id()).encrypt(step_chunks("step"), record), times),
        ),
        ("encrypt: 140 bytes, further ones", await _plain(lambda: cipher.encrypt(step_chunks("step"), record), times)),
    ]


async def totals(deployment: Deployment, count: int) -> list[tuple[str, float]]:
    """Return the microseconds of a task and of a step in a worker. count: number of tasks, or of steps, of a round."""
    here = App("parts", settings=Settings(redis_url=deployment.url, namespace=deployment.namespace))
    tasks: dict[str, Task[Any, Any]] = {
        "noop": here.task(noop.handler),
        "walk": here.task(durability="sync")(walk.handler),
    }

    async def run_all(name: str, many: Sequence[dict[str, int]]) -> float:
        await tasks[name].enqueue_many(many)
        async with Worker(here, concurrency=32) as worker:
            began = time.thread_time()
            await worker.run(burst=True)
            return time.thread_time() - began

    async with here:
        tasks_took = [await run_all("noop", [{"number": n} for n in range(count)]) for _ in range(_ROUNDS)]
        steps_took = [await run_all("walk", [{"steps": count // 32}] * 32) for _ in range(_ROUNDS)]
    return [
        ("total: a no-op task in a worker, concurrency 32", median(tasks_took) / count * 1e6),
        ("total: a step, 32 concurrent tasks", median(steps_took) / (count // 32 * 32) * 1e6),
    ]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
) -> None:
    """Measure the CPU time of the parts of a task and of a step."""
    configure_logging("ERROR")
    table = Table("part", "us of CPU")
    for name, found in run(parts(100 if quick else 5_000)):
        table.add_row(name, f"{found:.1f}")
    with own_server(fsync=False) as deployment:
        for name, found in run(totals(deployment, 320 if quick else 30_000)):
            table.add_row(name, f"{found:.1f}")
    print(origin_line())
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
