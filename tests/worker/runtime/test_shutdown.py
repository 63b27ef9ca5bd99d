"""Graceful shutdown: steps in flight end, runs stop at the next step, and another worker continues at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings, State, TaskHandle, Worker
from perdure.worker.runtime.shared_settings import WorkerTimings
from perdure.worker.runtime.slots import Slots

from tests.support.lossy_proxy import LossyProxy
from tests.support.workers import (
    BOUND,
    bounded,
    consumers,
    history,
    pending,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
)

pytestmark = pytest.mark.integration

LEASE = 60.0
AT_ONCE = LEASE / 6
"""Seconds. A sweep would come after 22 s at the earliest."""


@pytest.fixture(autouse=True)
def rare_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reclaim rounds rare, so that a worker takes a message at once only after a nudge."""
    monkeypatch.setattr(Worker, "timings", WorkerTimings(sweep_interval=LEASE))


def app_with(settings: Settings, **changes: Any) -> App:
    return App("stop", settings=settings.model_copy(update={"lease": LEASE, **changes}))


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with app_with(settings, grace=BOUND) as app:
        yield app


class Stage:
    """A task with a step that waits until the test releases it."""

    def __init__(self, app: App) -> None:
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()
        self.calls: list[str] = []

        @app.task
        async def staged(ctx: Context) -> str:
            self.calls.append("handler")
            await ctx.step("first", self.first)
            await ctx.step("second", self.calls.append, "second")
            return f"attempt {ctx.attempt}, crashes {ctx.crashes}, resumed {ctx.resumed}"

        self.task = staged

    async def first(self) -> None:
        self.calls.append("first")
        self.entered.set()
        await self.proceed.wait()
        self.calls.append("first ended")


async def stop_in_the_middle(stage: Stage, worker: Worker, running: asyncio.Task[None]) -> TaskHandle[str]:
    """Stop the worker while the first step runs, let the step end, and wait until the worker ends."""
    handle = await stage.task.enqueue()
    await bounded(stage.entered.wait())
    worker.stop()
    stage.proceed.set()
    await bounded(running)
    return handle


async def test_a_step_in_flight_is_recorded_and_the_next_one_does_not_start(app: App) -> None:
    stage = Stage(app)
    async with Worker(app) as worker:
        handle = await stop_in_the_middle(stage, worker, asyncio.create_task(worker.run()))
    assert stage.calls == ["handler", "first", "first ended"]
    assert set(await recorded_steps(app, handle)) == {"d:first", "s:#handoff"}
    assert await handle.status() is State.QUEUED
    log = await history(handle)
    assert [event.type for event in log] == ["step_completed", "handed_off"]
    assert log[-1].data == {"why": "shutdown", "steps": 1}
    record = await handle.record()
    assert (record.attempts, record.crashes, record.step) == (0, 0, None)


async def test_an_idle_worker_takes_a_handed_over_task_at_once(app: App) -> None:
    stage = Stage(app)
    async with Worker(app, concurrency=1) as first:
        stopping = asyncio.create_task(first.run())
        handle = await stage.task.enqueue()
        await bounded(stage.entered.wait())
        async with running_worker(app) as second:  # blocks in its read: no message is waiting
            await one_waits_in_its_read(app)
            first.stop()
            stage.proceed.set()
            async with asyncio.timeout(AT_ONCE):
                assert await handle.result() == "attempt 1, crashes 0, resumed True"
            await bounded(stopping)
    assert stage.calls == ["handler", "first", "first ended", "handler", "second"]
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 0)
    assert record.worker == second.id


async def one_waits_in_its_read(app: App) -> None:
    async def blocked() -> bool:
        return b"blocked_clients:1" in await redis_command(app, "INFO", "clients")

    await wait_until(blocked, "a worker waits in its read")


async def test_many_tasks_are_handed_over_at_once(app: App) -> None:
    entered = asyncio.Semaphore(0)
    proceed = asyncio.Event()

    @app.task
    async def job(ctx: Context, number: int) -> tuple[int, int]:
        async def first() -> None:
            entered.release()
            await proceed.wait()

        await ctx.step("first", first)
        await ctx.step("second", len, "x")
        return ctx.attempt, ctx.crashes

    async with Worker(app, concurrency=10) as first:
        stopping = asyncio.create_task(first.run())
        handles = await job.enqueue_many({"number": number} for number in range(10))
        for _ in handles:
            await bounded(entered.acquire())
        async with running_worker(app, concurrency=3):
            await one_waits_in_its_read(app)
            first.stop()
            proceed.set()
            async with asyncio.timeout(AT_ONCE):
                assert [await handle.result() for handle in handles] == [(1, 0)] * 10
            await bounded(stopping)


async def test_parallel_steps_end_before_the_run_is_handed_over(app: App) -> None:
    calls: list[str] = []
    entered, proceed = asyncio.Event(), asyncio.Event()

    async def quick() -> None:
        calls.append("quick")

    async def slow() -> None:
        entered.set()
        await proceed.wait()
        calls.append("slow")

    @app.task
    async def job(ctx: Context) -> None:
        async def branch() -> None:
            await entered.wait()
            await stopped.wait()
            await ctx.step("quick", quick)

        await asyncio.gather(branch(), ctx.step("slow", slow))

    stopped = asyncio.Event()
    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(entered.wait())
        worker.stop()
        await anyio.wait_all_tasks_blocked()
        stopped.set()
        await anyio.wait_all_tasks_blocked()
        assert calls == []  # the other branch stops before its next step, and the step continues
        proceed.set()
        await bounded(running)
    assert calls == ["slow"]
    assert set(await recorded_steps(app, handle)) == {"d:slow", "s:#handoff"}


async def test_a_handler_that_ends_within_the_grace_period_is_settled(app: App) -> None:
    entered, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        entered.set()
        await proceed.wait()
        return "in time"

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(entered.wait())
        worker.stop()
        proceed.set()
        await bounded(running)
    assert await handle.status() is State.SUCCEEDED


async def endless(entered: asyncio.Event, cancelled: list[str]) -> None:
    entered.set()
    try:
        await anyio.sleep_forever()
    except asyncio.CancelledError:
        cancelled.append("cancelled")
        raise


async def assert_handed_over(app: App, handle: TaskHandle[Any]) -> None:
    assert [(owner, count) for _, owner, _, count in await pending(app)] == [("~released", 1)]
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.QUEUED, 0, 0)


@pytest.mark.parametrize("in_a_step", [True, False])
async def test_a_run_is_cancelled_and_handed_over_after_the_grace_period(settings: Settings, in_a_step: bool) -> None:
    entered, cancelled = asyncio.Event(), list[str]()
    async with app_with(settings, grace=0.1) as app:

        @app.task
        async def job(ctx: Context) -> None:
            if in_a_step:
                await ctx.step("endless", endless, entered, cancelled)
            else:
                await endless(entered, cancelled)

        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(entered.wait())
            worker.stop()
            await bounded(running)
        assert cancelled == ["cancelled"]
        await assert_handed_over(app, handle)


async def stop_twice(worker: Worker) -> None:
    worker.stop()
    worker.stop()


async def stop_and_stop_again_later(worker: Worker) -> None:
    worker.stop()
    await anyio.wait_all_tasks_blocked()
    worker.stop()


@pytest.mark.parametrize("stopping", [stop_twice, stop_and_stop_again_later])
async def test_a_second_stop_cancels_runs_at_once(
    settings: Settings, stopping: Callable[[Worker], Awaitable[None]]
) -> None:
    entered, cancelled = asyncio.Event(), list[str]()
    async with app_with(settings, grace=3600.0) as app:

        @app.task
        async def job(ctx: Context) -> None:
            await ctx.step("endless", endless, entered, cancelled)

        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(entered.wait())
            await stopping(worker)
            await bounded(running)
        assert cancelled == ["cancelled"]
        await assert_handed_over(app, handle)


async def test_a_cancelled_worker_hands_over_its_tasks(settings: Settings) -> None:
    entered, cancelled = asyncio.Event(), list[str]()
    async with app_with(settings, grace=0.1) as app:

        @app.task
        async def job(ctx: Context) -> None:
            await ctx.step("endless", endless, entered, cancelled)

        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(entered.wait())
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bounded(running)
        await assert_handed_over(app, handle)


async def test_a_task_that_is_read_during_the_stop_is_handed_over(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("one", calls.append, "one")

    async with Worker(app) as worker:
        fill = Slots.fill

        def stop_and_fill(slots: Slots, work: Coroutine[Any, Any, Any]) -> None:
            worker.stop()
            fill(slots, work)

        monkeypatch.setattr(Slots, "fill", stop_and_fill)
        handle = await job.enqueue()
        await bounded(worker.run())
    assert calls == []
    await assert_handed_over(app, handle)


async def test_an_idle_worker_stops_at_once(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with Worker(app, queues=[app.name, "other"]) as worker:
        running = asyncio.create_task(worker.run())
        await one_waits_in_its_read(app)
        worker.stop()
        async with asyncio.timeout(2.5):  # a blocking read would last 5 s
            await running


async def test_a_stopping_worker_reads_no_task(app: App) -> None:
    stage = Stage(app)

    async def reading_has_ended() -> bool:
        return b"blocked_clients:0" in await redis_command(app, "INFO", "clients")

    async with Worker(app, concurrency=5) as worker:
        running = asyncio.create_task(worker.run())
        await stage.task.enqueue()
        await bounded(stage.entered.wait())
        worker.stop()
        await wait_until(reading_has_ended, "the blocked read has ended")
        late = await stage.task.enqueue()
        stage.proceed.set()
        await bounded(running)
    assert stage.calls.count("handler") == 1
    assert await late.status() is State.QUEUED
    assert [(owner, count) for _, owner, _, count in await pending(app)] == [("~released", 1)]  # late was never read


async def test_a_stopped_worker_leaves_no_consumer_name(app: App) -> None:
    stage = Stage(app)
    async with Worker(app) as worker:
        await stop_in_the_middle(stage, worker, asyncio.create_task(worker.run()))
        assert worker.id in await consumers(app)
    assert await consumers(app) == {"~released"}


@pytest.mark.processes
async def test_a_worker_stops_in_time_while_redis_is_away(settings: Settings, tmp_path: Path) -> None:
    """Frozen connections answer nothing, and no lease is near its end: only the grace takes time."""
    entered, cancelled = asyncio.Event(), list[str]()
    async with LossyProxy(Path(settings.redis_url.removeprefix("unix://")), tmp_path / "line").open() as line:
        app = app_with(settings, redis_url=f"unix://{tmp_path / 'line'}", grace=0.1)

        @app.task
        async def job(ctx: Context) -> None:
            await ctx.step("endless", endless, entered, cancelled)

        async with app, Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            await job.enqueue()
            await bounded(entered.wait())
            line.hang()
            started = time.monotonic()
            worker.stop()
            await bounded(running)
            assert time.monotonic() - started < 5, "without Redis it took 10 s, and as long again to deregister"
            stopped = time.monotonic()
        assert time.monotonic() - stopped < 5
    assert cancelled == ["cancelled"]
