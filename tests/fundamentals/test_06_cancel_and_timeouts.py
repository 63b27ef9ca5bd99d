"""Cancellation and time limits."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from perdure import App, Context, Retry, State, TaskCancelled, TaskFailed, Worker

pytestmark = pytest.mark.integration


async def test_a_task_that_no_worker_runs_is_cancelled_at_once(app: App) -> None:
    """`cancel` returns the state of the task; `result` raises `TaskCancelled`."""

    @app.task
    async def never(ctx: Context) -> None:
        pytest.fail("a cancelled task was run")

    async with app:
        handle = await never.enqueue()
        assert await handle.cancel() is State.CANCELLED
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=10)


async def test_a_running_task_is_cancelled_like_an_asyncio_task(app: App) -> None:
    """The worker is notified and raises `CancelledError` in the handler. `finally` blocks run, and may await."""
    started, cleaned_up = asyncio.Event(), asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            await anyio.sleep(0.01)
            cleaned_up.set()

    async with app, Worker(app) as worker, asyncio.TaskGroup() as group:
        handle = await endless.enqueue()
        group.create_task(worker.run())
        await started.wait()
        assert await handle.cancel() is State.RUNNING  # the worker was asked
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=10)
        worker.stop()
    assert cleaned_up.is_set()


async def test_timeout_limits_one_run_of_a_task(app: App) -> None:
    """A run that takes longer counts as a failed attempt. Without attempts left, the reason is `timeout`."""

    @app.task(timeout=0.05, retry=Retry(max_attempts=1))
    async def slow(ctx: Context) -> None:
        await anyio.sleep_forever()

    async with app:
        handle = await slow.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskFailed) as failed:
            await handle.result(timeout=10)
        assert failed.value.reason == "timeout"


async def test_timeout_of_a_step_limits_one_try_of_it(app: App) -> None:
    """The step's own `retry` tries it again within the same attempt of the task."""
    tries = []

    async def fetch() -> str:
        tries.append("fetch")
        if len(tries) == 1:
            await anyio.sleep_forever()
        return "page"

    @app.task(retry=Retry(max_attempts=1))
    async def crawl(ctx: Context) -> str:
        return await ctx.options(timeout=0.05, retry=Retry(max_attempts=2, base=0)).step("fetch", fetch)

    async with app:
        handle = await crawl.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "page"
    assert len(tries) == 2
