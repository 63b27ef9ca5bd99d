"""Workers in the process of the test, and access to what they store in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import pytest
from perdure import App, TaskFailed, TaskHandle, Worker
from perdure.deadletter.letters import DeadLetter, find_letter
from perdure.queues import Gateway, Partition, TaskEvent
from perdure.queues.delivery.leases import touch_partition
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import Script, pairs

R = TypeVar("R")

BOUND = 60.0
"""Seconds that a test waits for anything. The bound only ends a failing test; no result depends on it."""

FRESH = 3_600_000
"""Milliseconds of idle time after which every lease has expired."""


@asynccontextmanager
async def running_worker(
    app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None
) -> AsyncIterator[Worker]:
    """Run a worker for the duration of the block."""
    async with Worker(app, concurrency=concurrency, queues=queues) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            worker.stop()
            await asyncio.wait_for(running, BOUND)


async def work_off(app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None) -> None:
    """Run a worker until the queues are empty."""
    with anyio.fail_after(BOUND):
        async with Worker(app, concurrency=concurrency, queues=queues) as worker:
            await worker.run(burst=True)


async def bounded(awaitable: Awaitable[R]) -> R:
    """Await the result within the bound."""
    return await asyncio.wait_for(awaitable, BOUND)


async def wait_until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Poll until the condition is true, for a change that Redis does not publish."""
    with anyio.move_on_after(BOUND):
        while not await condition():  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        return
    pytest.fail(f"never happened: {what}")


async def redis_command(app: App, *command: str | bytes | int | float) -> Any:
    return await app.producer.gateway.command(*command)


def partition_of(app: App, queue: str | None = None) -> Partition:
    return app.producer.namespace.partition(queue or app.name)


async def pending(app: App, queue: str | None = None) -> list[tuple[bytes, str, int, int]]:
    """Return the pending list of a queue: entry, consumer, idle milliseconds, delivery count."""
    found = await redis_command(app, "XPENDING", partition_of(app, queue).ready, GROUP, "-", "+", 1000)
    return [(entry, name.decode(), idle, count) for entry, name, idle, count in found]


async def consumers(app: App, queue: str | None = None) -> set[str]:
    """Return the consumer names in the group of the queue."""
    found = await redis_command(app, "XINFO", "CONSUMERS", partition_of(app, queue).ready, GROUP)
    return {pairs(one)[b"name"].decode() for one in found}


async def recorded_steps(app: App, handle: TaskHandle[Any]) -> dict[str, bytes]:
    """Return the checkpoint as stored in Redis: `d:` results, `i:` intents, `s:` progress."""
    found = pairs(await redis_command(app, "HGETALL", handle.partition.steps(handle.id)))
    return {name.decode(): value for name, value in found.items()}


async def history(handle: TaskHandle[Any]) -> list[TaskEvent]:
    return [event async for event in handle.events(follow=False)]


async def letter(app: App, handle: TaskHandle[Any]) -> DeadLetter:
    """Wait until the task is a dead letter, and return it."""
    with pytest.raises(TaskFailed):
        await handle.result(timeout=BOUND)
    found = await find_letter(app.producer.gateway, [handle.partition], handle.id)
    assert found is not None
    return found


async def take_and_die(app: App, *, name: str = "dead-worker", queue: str | None = None) -> bytes:
    """Read the next message as a worker that dies at once, and expire its lease; return the entry."""
    stream = partition_of(app, queue).ready
    await _create_group(app, stream)
    await touch(app, queue)
    reply = await redis_command(app, "XREADGROUP", "GROUP", GROUP, name, "COUNT", 1, "STREAMS", stream, ">")
    entry: bytes = reply[0][1][0][0]
    await redis_command(app, "XCLAIM", stream, GROUP, name, 0, entry, "IDLE", FRESH, "JUSTID")
    return entry


async def touch(app: App, queue: str | None = None) -> None:
    """Touch the partition, as the worker that dies has done; otherwise a new worker restarts the leases."""
    await touch_partition(app.producer.gateway, partition_of(app, queue), FRESH)


@asynccontextmanager
async def attended(gateway: Gateway, partition: Partition, lease: float) -> AsyncIterator[None]:
    """Touch the partition all the time, as another worker does, so that no lease is restarted."""

    async def touch_again() -> None:
        while True:
            await touch_partition(gateway, partition, round(lease * 1000))
            await anyio.sleep(lease / 8)

    touching = asyncio.create_task(touch_again())
    try:
        yield
    finally:
        touching.cancel()
        await asyncio.gather(touching, return_exceptions=True)


async def steal(app: App, handle: TaskHandle[Any], *, name: str = "thief", expired: bool = False) -> bytes:
    """Claim the delivery of a running task, as a worker does after the lease expired; return the entry.

    expired: the lease of the thief has expired, too, so the next worker claims the delivery. The same command sets
    that: when it is executed, the heartbeat of the worker may cancel a handler that calls this.
    """
    entry: bytes = await redis_command(app, "HGET", handle.partition.record(handle.id), "entry")
    idle = ("IDLE", FRESH) if expired else ()
    await redis_command(app, "XCLAIM", handle.partition.ready, GROUP, name, 0, entry, *idle)
    return entry


async def expire_lease(app: App, entry: bytes, *, name: str = "thief", queue: str | None = None) -> None:
    """Expire the lease of a stolen delivery."""
    stream = partition_of(app, queue).ready
    await redis_command(app, "XCLAIM", stream, GROUP, name, 0, entry, "IDLE", FRESH, "JUSTID")


async def _create_group(app: App, stream: str) -> None:
    if not await redis_command(app, "EXISTS", stream) or not await redis_command(app, "XINFO", "GROUPS", stream):
        await redis_command(app, "XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


class Gate:
    """Gate that holds back checkpoint writes, and records which scripts were sent, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        self.sent: list[str] = []
        run = Gateway.run

        async def gated(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if script.name == "write_checkpoint":
                self.reached.set()
                await self.open.wait()
            self.sent.append(script.name)
            return await run(gateway, script, keys, args)

        monkeypatch.setattr(Gateway, "run", gated)
