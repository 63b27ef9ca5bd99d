"""Runs that end early: a timeout, a cancellation by a caller, or a lost lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from perdure import (
    App,
    Context,
    LeaseLost,
    Middleware,
    Retry,
    Settings,
    Settlement,
    State,
    TaskCancelled,
    TaskHandle,
    Worker,
)
from perdure.deadletter.letters import count_letters
from perdure.deadletter.policy import Reason
from perdure.queues import TaskNotFound
from perdure.worker.runtime.maintenance.registration import HintListener

from tests.support.workers import (
    bounded,
    expire_lease,
    history,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("ends", lease=0.9)]


@pytest.fixture
async def patient(settings: Settings) -> AsyncIterator[App]:
    """Return an app that renews no lease within a test: a third of the lease exceeds the time limit of the test."""
    async with App("ends", settings=settings.model_copy(update={"lease": 300.0})) as app:
        yield app


@pytest.fixture
def unnotified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers miss each notification that a task is to be cancelled."""
    monkeypatch.setattr(HintListener, "run", lambda _: anyio.sleep_forever())


class Endless:
    """A coroutine that runs until it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self) -> None:
        self.started.set()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# timeouts


async def test_a_run_over_its_timeout_is_cancelled_and_retried_and_then_buried(app: App) -> None:
    endless = Endless()
    attempts: list[int] = []

    @app.task(timeout=0.05, retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        await endless()

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.TIMEOUT, 2)
    assert found.error.endswith("TaskTimeout")
    assert found.message == "task 'job' ran longer than 0.05 s"
    assert endless.cancelled.is_set()
    assert attempts == [1, 2]


async def test_the_timeout_of_the_producer_overrides_the_timeout_of_the_task(app: App) -> None:
    endless = Endless()

    @app.task(timeout=3600, retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await endless()

    handle = await job.options(timeout=0.05).enqueue()
    await work_off(app)
    assert (await letter(app, handle)).message == "task 'job' ran longer than 0.05 s"


async def test_steps_before_the_timeout_are_kept(app: App) -> None:
    calls: list[int] = []

    @app.task(timeout=0.5, retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> str:
        await ctx.step("once", calls.append, 1)
        if ctx.attempt == 1:
            await ctx.step("endless", Endless())
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert calls == [1]


async def test_a_handler_that_cleans_up_after_its_timeout_has_timed_out(app: App) -> None:
    cleaned: list[str] = []

    @app.task(timeout=0.05, retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0.01)
            cleaned.append("cleaned")

    handle = await job.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.TIMEOUT
    assert cleaned == ["cleaned"]


async def test_a_step_over_its_timeout_is_a_timeout(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.options(timeout=0.05).step("endless", Endless())

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.TIMEOUT
    assert found.message == "step 'endless' ran longer than 0.05 s"


async def test_a_handler_that_cancels_itself_has_failed(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        raise asyncio.CancelledError

    @app.task
    async def other(ctx: Context) -> str:
        return "runs"

    handle, another = await job.enqueue(), await other.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.ATTEMPTS_EXHAUSTED
    assert "cancelled from within its own handler" in found.message
    assert await bounded(another.result()) == "runs"


# cancelling


@pytest.mark.parametrize("delay", [0.0, 3600.0])
async def test_a_task_that_is_not_running_is_cancelled_at_once(patient: App, delay: float) -> None:
    ran: list[int] = []

    @patient.task
    async def job(ctx: Context) -> None:
        ran.append(1)

    async with running_worker(patient, queues=["other"]):  # creates no consumer group on the queue of the task
        handle = await job.options(delay=delay).enqueue()
        assert await handle.cancel() is State.CANCELLED
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
    await work_off(patient)
    assert ran == []
    assert await handle.cancel() is State.CANCELLED


@pytest.mark.usefixtures("unnotified")
async def test_a_running_task_is_cancelled_at_the_next_lease_renewal(app: App) -> None:
    endless = Endless()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("once", len, "x")
        await ctx.step("endless", endless)

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(endless.started.wait())
        assert await handle.cancel() is State.RUNNING
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
        await bounded(endless.cancelled.wait())

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the slot is free again")
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.CANCELLED, 0, 0)
    assert list(await recorded_steps(app, handle)) == ["d:once"]


@pytest.mark.usefixtures("unnotified")
async def test_a_running_task_is_cancelled_at_its_next_step(patient: App) -> None:
    calls: list[str] = []
    started, proceed = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        started.set()
        await proceed.wait()
        calls.append("first")

    @patient.task
    async def job(ctx: Context) -> None:
        await ctx.step("first", first)
        await ctx.step("second", calls.append, "second")

    async with running_worker(patient):
        handle = await job.enqueue()
        await bounded(started.wait())
        assert await handle.cancel() is State.RUNNING
        proceed.set()
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
    assert calls == ["first"]


@pytest.mark.usefixtures("unnotified")
async def test_a_task_that_ends_before_its_cancellation_keeps_its_result(patient: App) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @patient.task
    async def job(ctx: Context) -> str:
        started.set()
        await proceed.wait()
        return "too late"

    async with running_worker(patient):
        handle = await job.enqueue()
        await bounded(started.wait())
        assert await handle.cancel() is State.RUNNING
        proceed.set()
        assert await bounded(handle.result()) == "too late"
        assert await handle.cancel() is State.SUCCEEDED


@pytest.mark.usefixtures("unnotified")
async def test_a_task_that_fails_before_its_cancellation_is_cancelled(patient: App) -> None:
    """The request was accepted, so the task must not end as a dead letter."""
    started, fails = asyncio.Event(), asyncio.Event()
    settled: list[tuple[State, str, str | None]] = []

    class Watching(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: Callable[[], Awaitable[Any]]) -> None:
            await call_next()
            settled.append((settlement.state, settlement.stop, settlement.reason))

    async with App("ends", settings=patient.settings, middleware=[Watching()]) as app:

        @app.task(retry=Retry(max_attempts=1))
        async def job(ctx: Context) -> None:
            started.set()
            await fails.wait()
            raise ValueError("it fails before the cancellation reaches it")

        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(started.wait())
            assert await handle.cancel() is State.RUNNING
            fails.set()
            with pytest.raises(TaskCancelled):
                await bounded(handle.result())
            assert await handle.cancel() is State.CANCELLED
        assert await count_letters(app.producer.gateway, [handle.partition]) == 0
    assert settled == [(State.CANCELLED, "cancelled", None)]


async def test_a_cancelled_task_whose_worker_died_is_not_run_again(patient: App) -> None:
    ran: list[int] = []

    @patient.task
    async def job(ctx: Context) -> None:
        ran.append(1)

    handle = await job.enqueue()
    await take_and_die(patient)
    assert await handle.cancel() is State.RUNNING
    await work_off(patient)
    assert await handle.status() is State.CANCELLED
    assert ran == []


async def test_cancelling_a_missing_task_fails(patient: App) -> None:
    @patient.task
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    gone = TaskHandle[None]("gone", handle.partition, patient.producer.gateway, patient.producer.notifications)
    with pytest.raises(TaskNotFound, match="no task gone in queue 'ends'"):
        await gone.cancel()


# the lease


async def test_a_run_that_lost_its_lease_is_cancelled_at_the_next_lease_renewal(app: App) -> None:
    endless = Endless()
    runs: list[int] = []

    @app.task
    async def job(ctx: Context) -> tuple[int, int]:
        runs.append(ctx.crashes)
        if len(runs) == 1:
            await endless()
        return ctx.attempt, ctx.crashes

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(endless.started.wait())
        entry = await steal(app, handle)
        await bounded(endless.cancelled.wait())
        await expire_lease(app, entry)
        assert await bounded(handle.result()) == (1, 2)
    assert runs == [0, 2]


async def test_a_step_without_the_lease_is_refused_and_the_run_ends(patient: App) -> None:
    calls: list[str] = []
    started, proceed = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        started.set()
        await proceed.wait()

    @patient.task
    async def job(ctx: Context) -> None:
        await ctx.step("first", first)
        calls.append("went on")

    async with running_worker(patient) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(patient, handle)
        proceed.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the loser ends")
    assert calls == []
    assert await recorded_steps(patient, handle) == {}
    assert await history(handle) == []


@pytest.mark.parametrize("ends", ["returns", "raises", "catches it"])
async def test_an_outcome_without_the_lease_is_not_stored(patient: App, ends: str) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @patient.task
    async def job(ctx: Context) -> str:
        started.set()
        await proceed.wait()
        if ends == "raises":
            raise ConnectionError
        if ends == "catches it":
            try:
                await ctx.step("refused", len, "x")
            except BaseException:  # noqa: BLE001 - a handler may catch too much
                return "of the loser"
        return "of the loser"

    async with running_worker(patient) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(patient, handle)
        proceed.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the loser ends")
    record = await handle.record()
    assert (record.state, record.worker, record.attempts) == (State.RUNNING, "thief", 0)
    assert record.result is None


async def test_a_worker_that_reclaims_its_own_task_ends_the_earlier_run(patient: App) -> None:
    """After an outage longer than the lease, the worker may reclaim its own message before it renews the lease."""
    runs: list[Endless] = []
    started = asyncio.Semaphore(0)

    @patient.task
    async def job(ctx: Context) -> None:
        runs.append(Endless())
        started.release()
        await runs[-1]()

    async with Worker(patient) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(started.acquire())
        await steal(patient, handle, expired=True)
        await redis_command(patient, "XADD", handle.partition.nudge, "*", "why", "released")
        await bounded(started.acquire())
        await bounded(runs[0].cancelled.wait())
        worker.stop()
        worker.stop()
        await bounded(running)
        assert runs[1].cancelled.is_set()
    assert [event.type for event in await history(handle)] == ["resumed", "handed_off"]


async def test_a_late_write_of_a_run_is_refused_after_its_worker_reclaimed_the_task(patient: App) -> None:
    """Worker and message are the same: only the delivery count distinguishes the runs."""
    started = asyncio.Semaphore(0)
    first_ends, second_ends = asyncio.Event(), asyncio.Event()
    ends = [(first_ends, "of the loser"), (second_ends, "of the heir")]

    async def stubborn() -> str:
        end, value = ends.pop(0)
        started.release()
        with anyio.CancelScope(shield=True):
            await end.wait()
        return value

    @patient.task
    async def job(ctx: Context) -> str:
        return await ctx.step("stubborn", stubborn)

    async with running_worker(patient) as worker:
        handle = await job.enqueue()
        await bounded(started.acquire())
        await steal(patient, handle, expired=True)
        await redis_command(patient, "XADD", handle.partition.nudge, "*", "why", "released")
        await bounded(started.acquire())
        first_ends.set()

        async def one_left() -> bool:
            return worker.in_flight == 1

        await wait_until(one_left, "the loser has left")
        assert await recorded_steps(patient, handle) == {}
        second_ends.set()
        assert await bounded(handle.result()) == "of the heir"


async def test_a_handler_that_catches_lease_lost_is_cancelled(patient: App) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()
    endless = Endless()

    @patient.task
    async def job(ctx: Context) -> None:
        started.set()
        await proceed.wait()
        with contextlib.suppress(LeaseLost):
            await ctx.step("refused", len, "x")
        await endless()

    async with running_worker(patient):
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(patient, handle)
        proceed.set()
        await bounded(endless.cancelled.wait())
