"""`ctx.progress`: reported at most once a second, the last value always, kept over retries and at the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, Settings, current_step
from perdure.queues import DecryptionError, State
from perdure.queues.delivery.checkpoint import Entry, Kind, Written
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.durable.run import Run
from perdure.worker.errors import StepOutsideTask

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("work")]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Entries that were sent to Redis."""
    entries: list[Entry] = []
    write = CheckpointWriter._write

    def noted(writer: CheckpointWriter, puts: Sequence[Any], *, replicated: bool = False) -> Awaitable[Written]:
        entries.extend(entry for put in puts for entry in put[0])
        return write(writer, puts, replicated=replicated)

    monkeypatch.setattr(CheckpointWriter, "_write", noted)
    return entries


async def test_the_last_of_many_reports_is_written_and_few_before_it(app: App, written: list[Entry]) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        for page in range(1000):
            await ctx.progress(page + 1, 1000, f"page {page + 1}")
            await asyncio.sleep(0)

    async with app:
        handle = await job.enqueue()
        assert await handle.progress() is None
        await work_off(app)
        progress = await handle.progress()
        assert progress is not None
        assert (progress.done, progress.total, progress.note, progress.share) == (1000, 1000, "page 1000", 1.0)
        assert progress.at > 0
        assert await handle.status() is State.SUCCEEDED
    assert 1 < len(written) < 20


async def test_a_report_appears_while_the_task_runs(app: App) -> None:
    ends = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.progress(1)
        await ctx.progress(2, note="two")
        await ends.wait()

    async with app, running_worker(app):
        handle = await job.enqueue()

        async def reported() -> bool:
            progress = await handle.progress()
            return progress is not None and (progress.done, progress.total, progress.note) == (2, None, "two")

        await wait_until(reported, "the second report is written within about a second")
        ends.set()
        await bounded(handle.result())


async def test_a_step_in_a_thread_reports(app: App) -> None:
    def load(rows: int) -> int:
        step = current_step()
        for row in range(rows):
            anyio.from_thread.run(step.progress, row + 1, rows, "rows")
        return rows

    @app.task
    async def job(ctx: Context) -> int:
        return await ctx.step("load", load, 7)

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        progress = await handle.progress()
        assert progress is not None
        assert (progress.done, progress.total, progress.note) == (7, 7, "rows")
        assert [event.type async for event in handle.events(follow=False)] == ["step_completed"]


async def test_a_retry_shows_the_progress_of_the_attempt_before(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0))
    async def job(ctx: Context) -> int | None:
        if ctx.attempt == 1:
            await ctx.progress(5, 10)
            raise ValueError("half way")
        return None

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        progress = await handle.progress()
        assert progress is not None
        assert (progress.done, progress.total) == (5, 10)


async def test_a_resumed_run_that_reports_its_recorded_steps_again_lowers_nothing(
    app: App, written: list[Entry]
) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0))
    async def job(ctx: Context) -> None:
        for page in range(1, 4):
            await ctx.step("page", str, page)
            await ctx.progress(page)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if ctx.attempt == 1:
            raise ValueError("after three pages")

    async with app:
        await job.enqueue()
        await work_off(app)
    assert [entry.value for entry in written if entry.kind is Kind.PROGRESS][-2:] == [page(3), page(3)]


def page(number: int) -> bytes:
    return b'{"done":%d,"total":null,"note":""}' % number


async def test_following_events_shows_progress(app: App) -> None:
    seen = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.progress(1, 4, "one")
        await seen.wait()

    async with app, running_worker(app):
        handle = await job.enqueue()
        found = []
        async for event in handle.events():
            found.append(event)
            seen.set()
        assert [(event.type, event.data["done"], event.data["note"]) for event in found] == [("progress", 1, "one")]


async def test_progress_is_life_and_excuses_no_crash(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    excused: list[Run] = []
    monkeypatch.setattr(Run, "progressed", excused.append)

    @app.task(idle_timeout=1.0)
    async def job(ctx: Context) -> str:
        for number in range(8):
            await ctx.progress(number)
            await asyncio.sleep(0.3)
        return "alive"

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "alive"
    assert not excused


async def test_numbers_are_checked_and_long_notes_are_cut(app: App) -> None:
    contexts: list[Context] = []

    @app.task
    async def job(ctx: Context) -> list[str]:
        contexts.append(ctx)
        problems = []
        for arguments in [(-1,), (math.nan,), (1, 0), (1, -5), ("3",), (True,), (1, math.inf)]:
            try:
                await ctx.progress(*arguments)  # type: ignore[arg-type]
            except ValueError as error:
                problems.append(str(error))
        await ctx.progress(12, 10, "x" * 500)
        return problems

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == [
            "done must be a number of at least 0, got -1",
            "done must be a number of at least 0, got nan",
            "total must be more than 0, or None if it is unknown, got 0",
            "total must be a number of at least 0, got -5",
            "done must be a number of at least 0, got '3'",
            "done must be a number of at least 0, got True",
            "total must be a number of at least 0, got inf",
        ]
        progress = await handle.progress()
        assert progress is not None
        assert (progress.done, progress.share, len(progress.note)) == (12, 1.0, 200)
        with pytest.raises(StepOutsideTask, match="after the task had ended"):
            await contexts[0].progress(1)


async def test_progress_is_encrypted_where_keys_are_set(settings: Settings) -> None:
    app = App("work", settings=with_keys(settings, FIRST))

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.progress(1, 2, "a name")

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        progress = await handle.progress()
        assert progress is not None
        assert progress.note == "a name"
        stored = await app.producer.gateway.command("HGET", handle.partition.record(handle.id), "progress")
        assert b"a name" not in stored
    async with App("work", settings=settings) as other:
        found = await other.producer.find(handle.id)
        assert found is not None
        with pytest.raises(DecryptionError):
            await found.progress()
        shown = (await found.record()).summary()["progress"]
        assert "a name" not in str(shown)
