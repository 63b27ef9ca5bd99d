"""Workers inside the test's own process, and looks into what they leave in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import pytest
from perdure import App, TaskFailed, TaskHandle, Worker
from perdure.deadletter import DeadLetter, find_letter
from perdure.queues import Gateway, Partition, Script, TaskEvent, pairs
from perdure.queues.keys import GROUP

R = TypeVar("R")

BOUND = 30.0
"""Seconds for anything a test waits for. They bound a failure; no test passes or fails by how long it took."""

FRESH = 3_600_000
"""Milliseconds of idle time that make any lease have passed."""


@asynccontextmanager
async def working(app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None) -> AsyncIterator[Worker]:
    """A worker that runs while the block does, and ends with it."""
    async with Worker(app, concurrency=concurrency, queues=queues) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            worker.stop()
            await asyncio.wait_for(running, BOUND)


async def work_off(app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None) -> None:
    """Work until the queues are empty."""
    with anyio.fail_after(BOUND):
        async with Worker(app, concurrency=concurrency, queues=queues) as worker:
            await worker.run(burst=True)


async def soon(awaitable: Awaitable[R]) -> R:
    """What comes of it, within the bound."""
    return await asyncio.wait_for(awaitable, BOUND)


async def until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Ask until it is true: for what Redis tells nobody by itself."""
    with anyio.move_on_after(BOUND):
        while not await condition():  # noqa: ASYNC110 - no event tells of it
            await anyio.sleep(0.01)
        return
    pytest.fail(f"never happened: {what}")


async def redis_command(app: App, *command: str | bytes | int | float) -> Any:
    return await app.producer.gateway.command(*command)


def partition_of(app: App, queue: str = "default") -> Partition:
    return app.producer.namespace.partition(queue)


async def pending(app: App, queue: str = "default") -> list[tuple[bytes, str, int, int]]:
    """The pending list of a queue: entry, consumer, idle milliseconds, delivery count."""
    found = await redis_command(app, "XPENDING", partition_of(app, queue).ready, GROUP, "-", "+", 1000)
    return [(entry, name.decode(), idle, count) for entry, name, idle, count in found]


async def consumers(app: App, queue: str = "default") -> set[str]:
    """Names in the queue's group."""
    found = await redis_command(app, "XINFO", "CONSUMERS", partition_of(app, queue).ready, GROUP)
    return {pairs(one)[b"name"].decode() for one in found}


async def recorded_steps(app: App, handle: TaskHandle[Any]) -> dict[str, bytes]:
    """The checkpoint as it stands in Redis: `d:` results, `i:` intents, `s:` progress."""
    found = pairs(await redis_command(app, "HGETALL", handle.partition.steps(handle.id)))
    return {name.decode(): value for name, value in found.items()}


async def history(handle: TaskHandle[Any]) -> list[TaskEvent]:
    return [event async for event in handle.events(follow=False)]


async def letter(app: App, handle: TaskHandle[Any]) -> DeadLetter:
    """The dead letter that the task has become, once it has."""
    with pytest.raises(TaskFailed):
        await handle.result(timeout=BOUND)
    found = await find_letter(app.producer.gateway, [handle.partition], handle.id)
    assert found is not None
    return found


async def take_and_die(app: App, *, name: str = "dead-worker", queue: str = "default") -> bytes:
    """Take the next message as a worker that is never heard of again, its lease long past; returns the entry."""
    stream = partition_of(app, queue).ready
    await _create_group(app, stream)
    reply = await redis_command(app, "XREADGROUP", "GROUP", GROUP, name, "COUNT", 1, "STREAMS", stream, ">")
    entry: bytes = reply[0][1][0][0]
    await redis_command(app, "XCLAIM", stream, GROUP, name, 0, entry, "IDLE", FRESH, "JUSTID")
    return entry


async def steal(app: App, handle: TaskHandle[Any], *, name: str = "thief") -> bytes:
    """Take a running task's delivery over, as a worker does when the lease has passed; returns the entry."""
    entry: bytes = await redis_command(app, "HGET", handle.partition.record(handle.id), "entry")
    await redis_command(app, "XCLAIM", handle.partition.ready, GROUP, name, 0, entry)
    return entry


async def give_up(app: App, entry: bytes, *, name: str = "thief", queue: str = "default") -> None:
    """Have the lease of a stolen delivery pass at once."""
    stream = partition_of(app, queue).ready
    await redis_command(app, "XCLAIM", stream, GROUP, name, 0, entry, "IDLE", FRESH, "JUSTID")


async def _create_group(app: App, stream: str) -> None:
    if not await redis_command(app, "EXISTS", stream) or not await redis_command(app, "XINFO", "GROUPS", stream):
        await redis_command(app, "XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


class Gate:
    """Holds back the records on their way to Redis, and notes which scripts went out in which order."""

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
