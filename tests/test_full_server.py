"""A server whose memory is full refuses writes; nothing may be lost or blamed for it."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import redis.asyncio
from conftest import default_kind
from perdure import App, Context, Settings, State, Unavailable, Worker
from servers import RedisServer, find_program

pytestmark = pytest.mark.integration


async def test_a_full_server_makes_workers_wait_and_costs_no_task_anything() -> None:
    program = find_program(default_kind())
    assert program is not None
    server = RedisServer(program).start()
    client = redis.asyncio.Redis.from_url(server.url)
    app = App("full", settings=Settings(redis_url=server.url, namespace=f"t{uuid.uuid4().hex}", lease=1.0))
    in_step, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        in_step.set()
        await go_on.wait()
        return "x" * 1000

    @app.task
    async def task(ctx: Context) -> int:
        return len(await ctx.step("work", work))

    try:
        async with app, Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await task.enqueue()
            await in_step.wait()
            await client.config_set("maxmemory", 1)
            with pytest.raises(Unavailable, match="cannot serve now"):
                await task.enqueue()
            go_on.set()
            await asyncio.sleep(3 * app.settings.lease)  # long enough for a lease to be lost, were it not renewed
            assert not running.done()
            await client.config_set("maxmemory", 0)
            assert await handle.result(timeout=30) == 1000
            record = await handle.record()
            assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, 0)
            worker.stop()
            await running
    finally:
        await client.aclose()
        server.stop()
