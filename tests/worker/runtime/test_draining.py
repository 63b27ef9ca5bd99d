"""A drained worker takes no more tasks, finishes what it runs, and stops."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest
from perdure import App, Context, Worker
from perdure.queues.presence import DrainAnswer, drain_worker, list_workers

from tests.support.workers import bounded, running_worker, wait_until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("burst", [False, True])
async def test_a_drained_worker_finishes_its_task_takes_no_other_and_stops(app: App, burst: bool) -> None:
    started, end = anyio.Event(), anyio.Event()

    @app.task
    async def held(ctx: Context) -> str:
        started.set()
        await end.wait()
        return await ctx.step("last", lambda: "done")

    @app.task
    async def other(ctx: Context) -> None: ...

    gateway, namespace = app.producer.gateway, app.producer.namespace
    running = await held.enqueue()
    async with Worker(app, concurrency=4) as worker:
        run = asyncio.create_task(worker.run(burst=burst))
        await bounded(started.wait())
        assert await drain_worker(gateway, namespace, worker.id, by="ada") is DrainAnswer.ASKED

        async def draining() -> bool:
            return [info.draining for info in await list_workers(gateway, namespace)] == [True]

        await wait_until(draining, "the worker drains")
        waiting = await other.enqueue()
        assert not run.done()
        assert worker.in_flight == 1
        end.set()
        assert await bounded(running.result()) == "done"
        await bounded(run)
    assert (await running.record()).attempts == 1
    assert str((await waiting.record()).state) == "queued"
    assert await list_workers(gateway, namespace) == []
    async with running_worker(app):
        await bounded(waiting.result())


async def test_a_stop_cuts_a_drain_short(app: App) -> None:
    started = anyio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        started.set()
        while True:
            await ctx.step("wait", anyio.sleep, 0.01)

    handle = await endless.enqueue()
    async with Worker(app) as worker:
        run = asyncio.create_task(worker.run())
        await bounded(started.wait())
        worker.drain()
        await anyio.lowlevel.checkpoint()
        assert not run.done()
        worker.stop()
        await bounded(run)
    record = await handle.record()
    assert (str(record.state), record.attempts, record.crashes) == ("queued", 0, 0), "released, at no cost"
    await handle.cancel()


async def test_an_idle_worker_that_is_drained_stops_at_once(app: App) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    async with Worker(app) as worker:
        run = asyncio.create_task(worker.run())
        await drain_worker(app.producer.gateway, app.producer.namespace, worker.id)
        await bounded(run)
