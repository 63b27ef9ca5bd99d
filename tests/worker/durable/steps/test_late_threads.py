"""Threads of steps that have timed out or were cancelled: no other try of the step starts beside them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from perdure import (
    AgentState,
    App,
    Context,
    ContextBuilder,
    Retry,
    State,
    StepStillRunning,
    StepTimeout,
    SyncContext,
    TaskCancelled,
    current_context,
    current_step,
)
from perdure.deadletter.policy import Reason

from tests.support.workers import BOUND, bounded, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration


class Payment:
    """A plain function that acts when it is released, and knows how many of its calls ran at once."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started = threading.Event()
        self.paid: list[str] = []
        self.running = self.most = self.calls = 0
        self._lock = threading.Lock()

    def pay(self, order: str) -> str:
        with self._lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.started.set()
        try:
            assert self.release.wait(BOUND)
        finally:
            with self._lock:
                self.running -= 1
        self.paid.append(order)
        return f"receipt {len(self.paid)}"

    async def started_in_loop(self) -> None:
        await bounded(asyncio.to_thread(self.started.wait, BOUND))


@pytest.fixture
def payment() -> Iterator[Payment]:
    payment = Payment()
    yield payment
    payment.release.set()


async def test_a_step_that_is_tried_again_waits_for_its_thread_and_takes_the_result(app: App, payment: Payment) -> None:
    tries: list[str] = []

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        options = ctx.options(timeout=0.05, retry=Retry(max_attempts=1000, base=0.01, factor=1))
        return await options.step("pay", payment.pay, "A-17")

    async with running_worker(app):
        handle = await job.enqueue()
        await payment.started_in_loop()

        async def tried() -> bool:
            tries[:] = [event.type async for event in handle.events(follow=False)]
            return len(tries) >= 3

        await wait_until(tried, "later tries of the step fail")
        payment.release.set()
        assert await bounded(handle.result()) == "receipt 1"
    assert (payment.calls, payment.most) == (1, 1)
    assert set(await recorded_steps(app, handle)) == {"d:pay"}


async def test_a_step_whose_thread_does_not_end_fails(app: App, payment: Payment) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        with pytest.raises(StepStillRunning, match=r"step 'pay' was not called again") as raised:
            await ctx.options(timeout=0.02, retry=Retry(max_attempts=3, base=0)).step("pay", payment.pay, "A-17")
        assert isinstance(raised.value, StepTimeout)
        return raised.value.step

    async with running_worker(app):
        handle = await job.enqueue()
        assert await bounded(handle.result()) == "pay"
        failed = [event.data["error"] async for event in handle.events(follow=False) if event.type == "step_failed"]
    names = [name.rpartition(".")[2] for name in failed]
    assert names == ["StepTimeout", "StepStillRunning", "StepStillRunning"]
    assert payment.calls == 1


@pytest.mark.parametrize("limited", ["step", "task", "step of a plain task", "plain task"])
async def test_the_next_attempt_waits_for_the_thread_and_finds_its_result(
    app: App, payment: Payment, limited: str
) -> None:
    timeout = 0.05 if limited.startswith("step") else None
    options: dict[str, Any] = {"retry": Retry(max_attempts=2, base=0), "timeout": None if timeout else 0.2}

    if limited.endswith("plain task"):

        @app.task(**options)
        def job(ctx: SyncContext) -> str:
            return ctx.options(timeout=timeout).step("pay", payment.pay, "A-17")
    else:

        @app.task(**options)
        async def job(ctx: Context) -> str:
            return await ctx.options(timeout=timeout).step("pay", payment.pay, "A-17")

    async with running_worker(app, concurrency=1) as worker:
        handle = await job.enqueue()
        await payment.started_in_loop()

        async def late() -> bool:
            return bool(worker._executor.threads.late) and worker._slots.free == 0

        await wait_until(late, "the attempt has ended, and holds its slot")
        assert await handle.status() is State.RUNNING
        payment.release.set()
        assert await bounded(handle.result()) == "receipt 1"
        assert (await handle.record()).attempts == 2
    assert (payment.calls, payment.paid) == (1, ["A-17"])


async def test_the_result_of_a_late_thread_does_not_replace_a_failure_that_the_handler_saw(
    app: App, payment: Payment
) -> None:
    other: list[int] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def job(ctx: Context) -> str:
        try:
            return await ctx.options(timeout=0.05).step("pay", payment.pay, "A-17")
        except StepTimeout:
            other.append(await ctx.step("other", lambda: 1))
        if ctx.attempt == 1:
            raise ConnectionError
        return "timed out"

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await payment.started_in_loop()

        async def late() -> bool:
            return bool(other) and worker.in_flight == 1 and not worker._executor.runs[0].task

        await wait_until(late, "the attempt has ended")
        assert payment.calls == 1
        payment.release.set()
        assert await bounded(handle.result()) == "timed out"
    assert (payment.calls, payment.most, other) == (1, 1, [1, 1])


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_task_that_waits_for_a_thread_can_be_stopped(app: App, payment: Payment, how: str) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0))
    async def job(ctx: Context) -> str:
        return await ctx.options(timeout=0.05).step("pay", payment.pay, "A-17")

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await payment.started_in_loop()

        async def held() -> bool:
            return bool(worker._executor.runs) and not worker._executor.runs[0].task

        await wait_until(held, "the attempt has ended")
        if how == "cancel":
            await handle.cancel()
            with pytest.raises(TaskCancelled):
                await bounded(handle.result())
    assert await handle.status() is (State.CANCELLED if how == "cancel" else State.SCHEDULED)
    assert payment.calls == 1


async def test_a_thread_that_exceeds_the_idle_limit_counts_as_lost(app: App, payment: Payment, log: list[str]) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0), idle_timeout=0.3)
    async def job(ctx: Context) -> str:
        if ctx.attempt == 2:
            payment.release.set()
        return await ctx.options(timeout=0.05 if ctx.attempt == 1 else BOUND).step("pay", payment.pay, "A-17")

    async with running_worker(app):
        handle = await job.enqueue()
        assert (await bounded(handle.result())).startswith("receipt")
    assert payment.calls == 2
    assert any("step pay did not end within the idle limit" in line for line in log)


async def test_parts_of_a_step_do_not_run_beside_their_threads(app: App, payment: Payment) -> None:
    async def outer() -> list[str]:
        ctx = current_context()
        options = ctx.options(timeout=0.05)
        if current_step().attempt == 2:
            payment.release.set()
        return [await options.step("pay", payment.pay, "A"), await options.step("pay", payment.pay, "B")]

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> list[str]:
        return await ctx.options(retry=Retry(max_attempts=2, base=0)).step("outer", outer)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["receipt 1", "receipt 2"]
    assert (payment.paid, payment.most) == (["A", "B"], 1)


async def test_the_error_of_a_late_thread_is_that_of_the_next_try(app: App) -> None:
    release, calls = threading.Event(), []

    def declined() -> None:
        calls.append(1)
        assert release.wait(BOUND)
        raise PermissionError("declined")

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        retry = Retry(max_attempts=1000, base=0.01, factor=1, never=(PermissionError,))
        await ctx.options(timeout=0.05, retry=retry).step("pay", declined)

    async with running_worker(app):
        handle = await job.enqueue()

        async def tried() -> bool:
            return len([event async for event in handle.events(follow=False) if event.type == "step_failed"]) > 1

        await wait_until(tried, "a second try")
        release.set()
        found = await letter(app, handle)
    assert (found.reason, found.error) == (Reason.ATTEMPTS_EXHAUSTED, "PermissionError")
    assert len(calls) == 1


async def test_a_result_that_nothing_waits_for_is_logged(app: App, payment: Payment, log: list[str]) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.options(timeout=0.05).step("pay", payment.pay, "A-17")

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        assert (await letter(app, handle)).reason is Reason.TIMEOUT
        payment.release.set()

        async def ended() -> bool:
            return not worker._executor.threads.late

        await wait_until(ended, "the thread ends")
    assert any("step pay returned" in line and "its result is dropped" in line for line in log)


async def test_a_model_that_is_a_plain_function_is_not_called_beside_itself(app: App, payment: Payment) -> None:
    """`ContextBuilder.ask` calls it in a thread of its step, which is an async function."""

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        state, retry = AgentState(goal="pay"), Retry(max_attempts=1000, base=0.01, factor=1)
        builder = ContextBuilder(window=10_000)
        return await builder.ask(ctx, state, lambda _: payment.pay("A-17"), timeout=0.05, retry=retry)

    async with running_worker(app):
        handle = await job.enqueue()

        async def tried() -> bool:
            return len([event async for event in handle.events(follow=False) if event.type == "step_failed"]) > 1

        await wait_until(tried, "a second try")
        payment.release.set()
        await bounded(handle.result())
    assert payment.most == 1
