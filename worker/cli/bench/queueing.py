"""No-op tasks: put on the queue, held by the server, worked off by one worker or by several processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.to_thread

from ...runtime import Worker
from ..failures import Failed
from . import limits
from .figures import Row, Size, message, timed
from .ground import Ground
from .memory import mean_memory, memory
from .tasks import noop

__all__ = ["processes", "tasks"]

_PRODUCERS: Final = 32
_SAMPLES: Final = 50
_ENDED_WITHIN: Final = 60.0


async def tasks(ground: Ground, size: Size) -> list[Row]:
    """Half of the tasks enqueued by calls that several producers await, half by one call; then all worked off."""
    half, data = size.tasks // 2, "x" * size.payload
    raw_add, raw_each, raw_work = await _raw(ground, 2 * half, data)
    numbers = iter(range(half))

    async def produce() -> None:
        for _ in numbers:
            await noop.enqueue(data)

    with timed() as awaited:
        async with anyio.create_task_group() as producers:
            for _ in range(_PRODUCERS):
                producers.start_soon(produce)
    with timed() as bulk:
        handles = await noop.enqueue_many({"data": data} for _ in range(half))
    records = [ground.partition.record(handle.id) for handle in handles[:: max(1, half // _SAMPLES)]]
    stream, record = await memory(ground, ground.partition.ready), await mean_memory(ground, records)
    async with Worker(ground.app, concurrency=size.concurrency) as worker:
        with timed() as worked:
            await worker.run(burst=True)
    queued = None if stream is None or record is None else stream / (2 * half) + record
    adding = f"XADD, {limits.WRITE_BATCH} a trip"
    reading = f"XREADGROUP + XACK + XDEL, {limits.READ_BATCH} a trip"
    by_one = f"no-op tasks, one worker, concurrency {size.concurrency}"
    return [
        Row("enqueue", f"enqueue, awaited by {_PRODUCERS} coroutines", "tasks/s", half / awaited(), raw_add, adding),
        Row("enqueue_bulk", "enqueue, one bulk call", "tasks/s", half / bulk(), raw_add, adding),
        Row("throughput", by_one, "tasks/s", 2 * half / worked(), raw_work, reading),
        Row("bytes_queued", "memory of a queued task", "bytes", queued, raw_each, "XADD"),
        Row("bytes_finished", "memory of a finished task", "bytes", await mean_memory(ground, records), None, ""),
    ]


async def _raw(ground: Ground, count: int, data: str) -> tuple[float, float | None, float]:
    """The raw client's: messages added per second, bytes of each, messages read and deleted per second."""
    with ground.raw_client() as client:
        limits.make_groups(client, ground.raw.ready)
        added = limits.add(client, ground.raw.ready, message(data), count)
        total = await memory(ground, ground.raw.ready)
        worked = limits.read_and_delete(client, ground.raw.ready, count)
        client.call("DEL", ground.raw.ready)
    return added, None if total is None else total / count, worked


async def processes(ground: Ground, size: Size) -> list[Row]:
    """The same with worker processes."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(size.processes):
            started.append(_start(ground, size.concurrency))  # noqa: PERF401 - those that started are to be stopped
        await _until_joined(ground, started)
        with timed() as took:
            await noop.enqueue_many({"data": "x" * size.payload} for _ in range(size.tasks))
            await _until_empty(ground, started)
    finally:
        for process in started:
            process.terminate()
        with anyio.CancelScope(shield=True):
            for process in started:
                await anyio.to_thread.run_sync(process.wait)
    what = f"no-op tasks, {size.processes} worker processes, enqueuing included"
    return [Row("throughput_processes", what, "tasks/s", size.tasks / took(), None, "")]


def _start(ground: Ground, concurrency: int) -> subprocess.Popen[bytes]:
    """A worker process, in a session of its own: a Ctrl-C is for the bench, which then stops it."""
    command = (sys.executable, "-m", "perdure.worker.cli", "worker", "run", "perdure.worker.cli.bench.tasks:app")
    return subprocess.Popen(
        [*command, "--concurrency", str(concurrency)],
        env=dict(ground.environment()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _until_joined(ground: Ground, started: Sequence[subprocess.Popen[bytes]]) -> None:
    def joined(count: int) -> bool:
        return count == len(started)

    await _until(ground, started, ("ZCARD", ground.namespace.workers), joined, "the worker processes did not start")


async def _until_empty(ground: Ground, started: Sequence[subprocess.Popen[bytes]]) -> None:
    def empty(count: int) -> bool:
        return count == 0

    await _until(ground, started, ("XLEN", ground.partition.ready), empty, "the queue did not become empty")


async def _until(
    ground: Ground,
    started: Sequence[subprocess.Popen[bytes]],
    command: tuple[str, str],
    holds: Callable[[int], bool],
    failure: str,
) -> None:
    with anyio.move_on_after(_ENDED_WITHIN):
        while not holds(await ground.gateway.command(*command)):
            if any(process.poll() is not None for process in started):
                raise Failed("a worker process ended by itself: run 'perdure worker run' to see why")
            await anyio.sleep(0.01)
        return
    raise Failed(f"{failure} within {_ENDED_WITHIN:.0f} s")
