"""Retries and dead letters: what happens when a task fails."""

from __future__ import annotations

import asyncio
import os
import sys

import anyio
import pytest
from perdure import App, Context, Retry, Settings, Snooze, State, TaskFailed, Worker

pytestmark = pytest.mark.integration


async def test_a_failed_attempt_is_tried_again_after_a_backoff(app: App) -> None:
    """An exception ends an attempt. The task is scheduled again, until it has failed `max_attempts` times."""

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def flaky(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise ConnectionError(f"attempt {ctx.attempt} failed")
        return ctx.attempt

    async with app:
        handle = await flaky.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == 3


async def test_a_task_without_attempts_left_becomes_a_dead_letter(app: App) -> None:
    """Perdure gives the task up, and keeps it with the reason and the error. `result` raises `TaskFailed`."""

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def broken(ctx: Context) -> None:
        raise ConnectionError("connection refused")

    async with app:
        handle = await broken.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskFailed, match="connection refused") as failed:
            await handle.result(timeout=10)
        assert failed.value.reason == "attempts_exhausted"
        assert await handle.status() is State.DEAD


async def test_an_error_that_no_retry_can_mend_is_not_retried(app: App) -> None:
    """List such exceptions as `never`."""
    attempts = []

    @app.task(retry=Retry(max_attempts=5, never=(ValueError,)))
    async def parse(ctx: Context, text: str) -> int:
        attempts.append(ctx.attempt)
        return int(text)

    async with app:
        handle = await parse.enqueue("seventeen")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskFailed) as failed:
            await handle.result(timeout=10)
    assert failed.value.reason == "not_retryable"
    assert attempts == [1]


async def test_snooze_runs_the_task_again_later_and_costs_no_attempt(app: App) -> None:
    """Raise `Snooze` if it is too early, and `RetryLater` to fail with a wait of your choice."""
    runs = []

    @app.task(retry=Retry(max_attempts=1))
    async def report(ctx: Context) -> int:
        runs.append(ctx.attempt)
        if len(runs) < 3:
            raise Snooze(after=0.01)
        return ctx.attempt

    async with app:
        handle = await report.enqueue()
        async with Worker(app) as worker, asyncio.TaskGroup() as group:
            group.create_task(worker.run())  # without burst, a worker runs until it is stopped
            assert await handle.result(timeout=10) == 1
            worker.stop()
    assert runs == [1, 1, 1]


async def test_a_replayed_dead_letter_resumes_at_the_recorded_step(app: App, settings: Settings) -> None:
    """After the cause is repaired, an operator replays the task. Its recorded steps are not run again."""
    downloads, is_repaired = [], False

    def download() -> str:
        downloads.append("report.csv")
        return "report.csv"

    def upload(name: str) -> str:
        if not is_repaired:
            raise PermissionError(f"upload of {name} denied")
        return f"uploaded {name}"

    @app.task(retry=Retry(max_attempts=1))
    async def publish(ctx: Context) -> str:
        name = await ctx.step("download", download)
        return await ctx.step("upload", upload, name)

    async with app:
        handle = await publish.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskFailed):
            await handle.result(timeout=10)

        is_repaired = True
        replay = [sys.executable, "-m", "perdure.worker.cli", "dlq", "replay", handle.id]  # perdure dlq replay ID
        place = {"PERDURE_REDIS_URL": settings.redis_url, "PERDURE_NAMESPACE": settings.namespace}
        await anyio.run_process(replay, env=os.environ | place)

        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "uploaded report.csv"
    assert downloads == ["report.csv"]
