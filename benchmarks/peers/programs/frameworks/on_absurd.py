"""Absurd: a caller, and a worker in another process (`absurd_worker`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from absurd_sdk import Absurd, AsyncAbsurd

from ..setup import CONCURRENCY, DATABASE_URL, POLL

BLOCKING = False

QUEUE = "bench"
STEPS = 10


async def work() -> None:
    """Run tasks as coroutines."""
    app = AsyncAbsurd(DATABASE_URL, queue_name=QUEUE)

    @app.register_task(name="walk")
    async def walk(params: Any, ctx: Any) -> int:
        number = params["number"]
        for at in range(STEPS):
            number = await ctx.step(f"add-{at}", lambda number=number: add(number))
        return number

    await app.start_worker(concurrency=CONCURRENCY, **options())


def work_in_threads() -> None:
    """Run tasks as plain functions in threads."""
    app = Absurd(DATABASE_URL, queue_name=QUEUE)

    @app.register_task(name="walk")
    def walk(params: Any, ctx: Any) -> int:
        number = params["number"]
        for at in range(STEPS):
            number = ctx.step(f"add-{at}", lambda number=number: number + 1)
        return number

    app.start_worker(concurrency=CONCURRENCY, **options())


def options() -> dict[str, float]:
    return {} if POLL is None else {"poll_interval": POLL}


async def add(number: int) -> int:
    return number + 1


@asynccontextmanager
async def walker() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Provide a durable task of ten steps, run by the worker. Each concurrent caller has a connection."""
    clients: asyncio.LifoQueue[AsyncAbsurd] = asyncio.LifoQueue()
    async with AsyncExitStack() as stack:
        for _ in range(CONCURRENCY):
            client = AsyncAbsurd(DATABASE_URL, queue_name=QUEUE)
            stack.push_async_callback(client.close)
            clients.put_nowait(client)

        async def one(number: int) -> int:
            client = await clients.get()
            try:
                spawned = await client.spawn("walk", {"number": number}, queue=QUEUE)
                return (await client.await_task_result(spawned["task_id"])).result
            finally:
                clients.put_nowait(client)

        yield one
