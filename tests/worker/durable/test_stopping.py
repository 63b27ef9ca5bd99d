"""How a handler sees that its run stops: `RunStopped`, `CancelledError` and `ctx.stopping`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
from loguru import logger
from perdure import App, Context, Retry, RunStopped, State, Stop, SyncContext, TaskHandle, Worker

from tests.support.workers import bounded, running_worker, steal, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(lease=30.0)]


@pytest.fixture
def logs() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{level} {message}")
    yield lines
    logger.remove(sink)


async def waits(handle: TaskHandle[Any]) -> None:
    await wait_until(lambda: is_in(handle, State.WAITING, State.SCHEDULED), "the task waits")


async def is_in(handle: TaskHandle[Any], *states: State) -> bool:
    return await handle.status() in states


class Seen:
    """What a handler got when its run stopped: the exceptions, and `ctx.stopping` in its clean-up."""

    def __init__(self) -> None:
        self.raised: list[str] = []
        self.stops: list[Stop | None] = []
        self.started = asyncio.Event()

    def note(self, error: BaseException, ctx: Context | SyncContext) -> None:
        self.raised.append(type(error).__name__)
        self.stops.append(ctx.stopping)

    async def endless(self) -> None:
        self.started.set()
        await anyio.sleep_forever()


# a wait in the handler's own task


async def ask(ctx: Context) -> object:
    return await ctx.ask("ada", "go on?")


async def ask_within_a_timeout(ctx: Context) -> object:
    async with asyncio.timeout(60):
        return await ask(ctx)


async def ask_within_a_scope(ctx: Context) -> object:
    answers: list[object] = []
    with anyio.move_on_after(60):
        answers.append(await ask(ctx))
    return answers


async def ask_with_a_task_beside(ctx: Context) -> object:
    beside = asyncio.create_task(anyio.sleep_forever())
    try:
        return await ask(ctx)
    finally:
        beside.cancel()


WAITS = (ask, ask_within_a_timeout, ask_within_a_scope, ask_with_a_task_beside)


@pytest.mark.parametrize("wait", WAITS)
async def test_a_wait_raises_run_stopped(app: App, wait: Callable[[Context], Awaitable[object]]) -> None:
    seen = Seen()

    @app.task
    async def job(ctx: Context) -> str:
        assert ctx.stopping is None
        try:
            await wait(ctx)
        except asyncio.CancelledError:
            raise AssertionError("a wait is no cancellation") from None
        except RunStopped as stopped:
            seen.note(stopped, ctx)
            raise
        assert ctx.stopping is None
        return "answered"

    async with running_worker(app):
        handle = await job.enqueue()
        await waits(handle)
        assert (seen.raised, seen.stops) == (["RunStopped"], [Stop("park", ends_task=False)])
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == "answered"


async def test_a_wait_in_a_thread_raises_run_stopped(app: App) -> None:
    seen = Seen()

    @app.task
    def job(ctx: SyncContext) -> str:
        assert ctx.stopping is None
        try:
            ctx.ask("ada", "go on?")
        except RunStopped as stopped:
            seen.note(stopped, ctx)
            with pytest.raises(RunStopped):
                ctx.step("late", len, "x")
            raise
        return "answered"

    async with running_worker(app):
        handle = await job.enqueue()
        await waits(handle)
        assert (seen.raised, seen.stops) == (["RunStopped"], [Stop("park", ends_task=False)])
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == "answered"


async def test_a_wait_in_the_body_of_a_task_group_is_a_group_with_run_stopped(app: App) -> None:
    seen = Seen()
    branches: list[str] = []

    @app.task
    async def job(ctx: Context) -> str:
        async def branch() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                branches.append(str(ctx.stopping and ctx.stopping.reason))

        try:
            async with asyncio.TaskGroup() as group:
                if not ctx.resumed and not branches:
                    group.create_task(branch())
                    await asyncio.sleep(0)
                await ask(ctx)
        except* RunStopped as stopped:
            seen.note(stopped.exceptions[0], ctx)
            raise
        return "answered"

    async with running_worker(app):
        handle = await job.enqueue()
        await waits(handle)
        assert (seen.raised, branches) == (["RunStopped"], ["park"])
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == "answered"


async def test_a_run_parks_when_its_branches_wait_too(app: App) -> None:
    """Steps of a branch run while the handler waits. Then that gets `RunStopped`, and the branch is cancelled."""
    seen, proceed = Seen(), asyncio.Event()
    calls: list[str] = []

    async def slow(name: str) -> str:
        calls.append(name)
        seen.started.set()
        await proceed.wait()
        return name

    @app.task
    async def job(ctx: Context) -> list[str]:
        async def branch() -> list[str]:
            try:
                done = [await ctx.step("first", slow, "first"), await ctx.step("second", slow, "second")]
                await ctx.inbox(wait=3600, sender="nemo")
                return done
            except BaseException as error:
                seen.note(error, ctx)
                raise

        beside = asyncio.create_task(branch())
        await seen.started.wait()
        try:
            asyncio.get_running_loop().call_later(0.05, proceed.set)
            await ask(ctx)
        except RunStopped as stopped:
            seen.note(stopped, ctx)
            with contextlib.suppress(asyncio.CancelledError):
                await beside
            raise
        return await beside

    async with running_worker(app):
        handle = await job.enqueue()
        await waits(handle)
        assert sorted(seen.raised) == ["CancelledError", "RunStopped"]
        assert calls == ["first", "second"]
        await handle.send("no", sender="nemo")
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == ["first", "second"]
    assert calls == ["first", "second"]


async def test_a_successor_stops_the_run_that_it_continues(app: App) -> None:
    seen = Seen()

    @app.task
    async def job(ctx: Context, left: int) -> str:
        if left:
            try:
                await ctx.continue_as(job, arguments={"left": left - 1})
            except RunStopped as stopped:
                seen.note(stopped, ctx)
                raise
        return "done"

    handle = await job.enqueue(1)
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert (seen.raised, seen.stops) == (["RunStopped"], [Stop("continue", ends_task=False)])


# stops from outside


async def awaits(seen: Seen, ctx: Context) -> None:
    await seen.endless()


async def step(seen: Seen, ctx: Context) -> None:
    await ctx.step("endless", seen.endless)


async def gathers(seen: Seen, ctx: Context) -> None:
    await asyncio.gather(ctx.step("a", seen.endless), ctx.step("b", seen.endless), return_exceptions=True)


async def waits_for_branches(seen: Seen, ctx: Context) -> None:
    await asyncio.wait([asyncio.create_task(ctx.step("a", seen.endless))])


async def groups(seen: Seen, ctx: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.step("a", seen.endless))
        group.create_task(ctx.step("b", seen.endless))


WHY: tuple[str, ...] = ("cancel", "timeout", "last timeout", "shutdown", "lost")
FORMS = (awaits, step, gathers, waits_for_branches, groups)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("why", WHY)
async def test_a_stop_from_outside_cancels_the_handler_and_says_why(
    app: App, why: str, form: Callable[[Seen, Context], Awaitable[None]]
) -> None:
    seen, ended = Seen(), asyncio.Event()

    @app.task(
        timeout=0.2 if "timeout" in why else None, retry=Retry(max_attempts=2 if why == "timeout" else 1, base=3600)
    )
    async def job(ctx: Context) -> None:
        try:
            await form(seen, ctx)
        except BaseException as error:
            seen.note(error, ctx)
            raise
        finally:
            ended.set()

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(seen.started.wait())
        if why == "cancel":
            await handle.cancel()
        elif why == "shutdown":
            worker.stop()
            worker.stop()
        elif why == "lost":
            await steal(app, handle)
            notice_lost(worker)
        await bounded(ended.wait())
        worker.stop()
        await bounded(running)
    assert seen.raised == ["CancelledError"]
    assert seen.stops == [Stop(why.removeprefix("last "), ends_task=why in ("cancel", "last timeout"))]  # type: ignore[arg-type]


def notice_lost(worker: Worker) -> None:
    """Let the worker notice that a lease is lost, as at its next renewal."""
    for run in worker._executor.runs:
        run.on_lost()


async def test_a_time_out_that_is_retried_never_ends_the_task(app: App) -> None:
    seen = Seen()

    @app.task(timeout=0.05, retry=Retry(max_attempts=5, base=0.0, never=(TimeoutError,)))
    async def job(ctx: Context) -> None:
        try:
            await seen.endless()
        finally:
            seen.stops.append(ctx.stopping)

    await job.enqueue()
    await work_off(app)
    assert seen.stops == [Stop("timeout", ends_task=True)], "the policy does not retry a time-out"


async def test_the_producers_attempts_decide_whether_a_time_out_ends_the_task(app: App) -> None:
    seen = Seen()

    @app.task(timeout=0.05, retry=Retry(max_attempts=1, base=0.0))
    async def job(ctx: Context) -> None:
        try:
            await seen.endless()
        finally:
            seen.stops.append(ctx.stopping)

    await job.options(max_attempts=2).enqueue()
    await work_off(app)
    assert seen.stops == [Stop("timeout", ends_task=False), Stop("timeout", ends_task=True)]


async def test_a_thread_sees_why_it_is_cancelled(app: App) -> None:
    seen = Seen()
    started, ended = threading.Event(), threading.Event()

    @app.task
    def job(ctx: SyncContext) -> None:
        try:
            started.set()
            ctx.step("endless", anyio.sleep_forever)
        except BaseException as error:
            seen.note(error, ctx)
            raise
        finally:
            ended.set()

    async with running_worker(app):
        handle = await job.enqueue()
        assert await bounded(asyncio.to_thread(started.wait, 60))
        await wait_until(lambda: is_in(handle, State.RUNNING), "the task runs")
        await handle.cancel()
        assert await bounded(asyncio.to_thread(ended.wait, 60))
    assert (seen.raised, seen.stops) == (["CancelledError"], [Stop("cancel", ends_task=True)])


# calls while a stop passes, and stops that are swallowed


async def test_a_branch_whose_step_meets_a_shutdown_does_not_hold_the_handler(app: App) -> None:
    """The handler awaits its branches in its clean-up; each step that one of them calls is refused at once."""
    started = asyncio.Event()
    seconds: list[float] = []
    proceed = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        async def branch(name: str) -> None:
            for number in range(1000):
                await ctx.step(f"{name}-{number}", proceed.wait)

        branches = [asyncio.create_task(branch(name)) for name in "ab"]
        try:
            started.set()
            await asyncio.wait(branches)
        finally:
            began = asyncio.get_running_loop().time()
            await asyncio.wait(branches)
            seconds.append(asyncio.get_running_loop().time() - began)

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(started.wait())
        worker.stop()
        proceed.set()
        await bounded(running)
    assert await handle.status() is State.QUEUED
    assert seconds and seconds[0] < 2.0, "branches hold the slot until the handler is cancelled again, after 4 s"


@pytest.mark.parametrize("form", ["async", "def"])
@pytest.mark.parametrize("why", ["park", "cancel"])
async def test_a_swallowed_stop_decides_and_is_logged(app: App, form: str, why: str, logs: list[str]) -> None:
    seen = Seen()

    @app.task(name="stubborn")
    async def asynchronous(ctx: Context) -> str:
        try:
            await (ask(ctx) if why == "park" else ctx.step("endless", seen.endless))
        except (RunStopped, asyncio.CancelledError):
            return "swallowed"
        return "answered"

    @app.task(name="stubborn thread")
    def synchronous(ctx: SyncContext) -> str:
        try:
            if why == "park":
                ctx.ask("ada", "go on?")
            else:
                ctx.step("endless", seen.endless)
        except (RunStopped, asyncio.CancelledError):
            return "swallowed"
        return "answered"

    job: Any = asynchronous if form == "async" else synchronous
    async with running_worker(app):
        handle = await job.enqueue()
        if why == "park":
            await waits(handle)
        else:
            await bounded(seen.started.wait())
            await handle.cancel()
            await wait_until(lambda: is_in(handle, State.CANCELLED), "the task is cancelled")
    record = await handle.record()
    assert record.result in (None, b"null")
    lines = [line for line in logs if "swallowed" in line or "is not stored" in line]
    assert len(lines) == 1, logs
    assert repr(job.name) in lines[0] and handle.id in lines[0] and why in lines[0]
