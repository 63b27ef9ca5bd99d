"""Workers inside the test's own process, and looks into what they leave in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import redis.asyncio
from perdure import App, Settings, TaskFailed, TaskHandle, Worker
from perdure.deadletter import DeadLetter, find_letter
from perdure.queues import Namespace, Partition, Record

BOUND = 30.0
"""Seconds for anything a test waits for; what is measured by it is only that it happens at all."""


@asynccontextmanager
async def working(
    app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None
) -> AsyncIterator[Worker]:
    """A worker that runs while the block does, and is stopped at its end."""
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
    async with Worker(app, concurrency=concurrency, queues=queues) as worker:
        with anyio.fail_after(BOUND):
            await worker.run(burst=True)


async def outcome[R](handle: TaskHandle[R]) -> R:
    return await handle.result(timeout=BOUND)
