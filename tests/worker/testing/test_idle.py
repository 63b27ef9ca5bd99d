"""run_until_idle: what it waits for, what it returns, and what it raises."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import redis
from perdure import App, Context, Retry, RetryLater, TaskFailed
from perdure.testing import PerdureFixture, drain, run_until_idle, run_worker
from perdure.worker.settings import Settings

pytestmark = pytest.mark.integration


@pytest.fixture
def app(settings: Settings) -> App:
    app = App("shop", settings=settings)

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def work(ctx: Context, what: str) -> str:
        if what == "fails" or (what == "fails once" and ctx.attempt == 1):
            raise ValueError(f"no {what}")
        if what == "hangs":
            await asyncio.Event().wait()
        if what == "later":
            raise RetryLater(after=3600)
        if what == "waits":
            await ctx.inbox(3600)
        return what

    return app


async def enqueue(app: App, *whats: str, delay: float = 0.0) -> None:
    for what in whats:
        await app.tasks["work"].options(delay=delay).enqueue(what)


async def test_it_counts_the_states_that_runs_left(app: App) -> None:
    async with app:
        await enqueue(app, "passes", "fails once", "waits")
        assert await run_until_idle(app) == {"succeeded": 2, "scheduled": 1, "waiting": 1}
        assert await run_until_idle(app) == {}


async def test_a_dead_letter_is_raised_with_the_error_of_the_handler(app: App) -> None:
    async with app:
        await enqueue(app, "passes", "fails")
        with pytest.raises(TaskFailed, match=r"dead letter \(attempts_exhausted\): ValueError: no fails") as raised:
            await run_until_idle(app)
        assert isinstance(raised.value.__cause__, ValueError)
        assert raised.value.__cause__.__traceback__ is not None


async def test_dead_letters_can_be_allowed(app: App) -> None:
    async with app:
        await enqueue(app, "fails")
        assert await run_until_idle(app, allow_failures=True) == {"scheduled": 1, "dead": 1}


async def test_a_delayed_task_is_waited_for_on_request(app: App) -> None:
    async with app:
        await enqueue(app, "passes", delay=1.5)
        await enqueue(app, "waits")
        assert await run_until_idle(app) == {"waiting": 1}
        assert await run_until_idle(app, wait_due=True) == {"succeeded": 1}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hangs", r"'shop' was not idle after [0-9.]+ seconds: task 'work' [0-9a-f-]+ runs$"),
        ("later", r"task 'work' [0-9a-f-]+ waits 3600 s for its retry after RetryLater"),
    ],
)
async def test_a_time_out_names_what_is_left(app: App, what: str, text: str) -> None:
    async with app:
        await enqueue(app, what)
        timeout, found = 0.5, ""
        while not found or found.endswith("its queues were not empty"):  # the worker had not started yet
            with pytest.raises(TimeoutError) as raised:
                await run_until_idle(app, timeout=timeout)
            timeout, found = 2 * timeout, str(raised.value)
        assert re.search(text, found)


async def test_a_worker_runs_beside_the_block(app: App) -> None:
    async with app:
        async with run_worker(app) as worker:
            handle = await app.tasks["work"].enqueue("passes")
            assert await handle.result(timeout=10) == "passes"
        assert worker.settled == 1


async def test_the_error_of_the_block_ends_the_worker_at_once(app: App) -> None:
    async with app:
        with pytest.raises(ZeroDivisionError):
            async with run_worker(app) as worker:
                await enqueue(app, "hangs")
                while not worker.in_flight:  # noqa: ASYNC110 - a worker has no event for it
                    await asyncio.sleep(0.01)
                raise ZeroDivisionError


def test_the_middleware_of_the_app_is_its_own_afterwards(app: App) -> None:
    assert asyncio.run(run_until_idle(app)) == {}
    assert app.middleware == ()


def test_the_keys_of_a_namespace_are_removed_and_no_others(redis_url: str, tmp_path: Path) -> None:
    app = App("shop")

    @app.task
    async def noop(ctx: Context) -> int:
        return 1

    async def run() -> int:
        async with app:
            handle = await noop.enqueue()
            with PerdureFixture(redis_url, tmp_path):
                pass
            await run_until_idle(app)
            return await handle.result(timeout=10)

    with redis.Redis.from_url(redis_url) as client:
        with PerdureFixture(redis_url, tmp_path) as fixture:
            assert asyncio.run(run()) == 1
            assert list(client.scan_iter(f"{{{fixture.namespace}*")) != []
        assert list(client.scan_iter(f"{{{fixture.namespace}*")) == []


async def test_drain_runs_delayed_tasks_and_retries_at_once(settings: Settings) -> None:
    app = App("shop", settings=settings)
    ran: list[str] = []

    @app.task(retry=Retry(max_attempts=3, base=3600, jitter=0.0))
    async def remind(ctx: Context, what: str) -> None:
        ran.append(what)
        if what == "flaky" and ctx.attempt < 3:
            raise ValueError(what)
        if what == "first":
            await remind.options(delay=86_400).enqueue("second")
        if what == "sleeps":
            await ctx.sleep(3600)

    async with app:
        for what in ("first", "flaky"):
            await remind.options(delay=7200).enqueue(what)
        await remind.enqueue("sleeps")
        assert await drain(app) == {"waiting": 1}
        assert await drain(app, due=True) == {"succeeded": 3, "scheduled": 2}
        assert sorted(ran) == ["first", "flaky", "flaky", "flaky", "second", "sleeps"]
        assert await drain(app, due=True) == {}


async def test_drain_raises_dead_letters_and_ends_in_time(app: App) -> None:
    async with app:
        await enqueue(app, "fails", delay=3600)
        with pytest.raises(TaskFailed, match="ValueError: no fails"):
            await drain(app, due=True)
        await enqueue(app, "hangs", delay=3600)
        with pytest.raises(TimeoutError, match=r"app 'shop' was not idle after 0\.5 seconds"):
            await drain(app, due=True, timeout=0.5)
