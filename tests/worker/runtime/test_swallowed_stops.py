"""Runs whose handler, or a library that it uses, swallows the cancellation by which it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Middleware,
    PlanStep,
    Retry,
    Settings,
    State,
    SyncContext,
    TaskCancelled,
    TaskHandle,
    Worker,
)
from perdure.deadletter.policy import Reason

from tests.support.workers import bounded, history, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("swallows", lease=30.0)]

ONCE = Retry(max_attempts=1)


async def ends_cancelled(handle: TaskHandle[Any]) -> None:
    with pytest.raises(TaskCancelled):
        await bounded(handle.result())
    assert await handle.status() is State.CANCELLED


async def swallow(started: asyncio.Event) -> None:
    started.set()
    with contextlib.suppress(asyncio.CancelledError):
        await anyio.sleep_forever()


CALLS: dict[str, Callable[[Context, list[str]], Awaitable[object]]] = {
    "step": lambda ctx, ran: ctx.step("late", ran.append, "step"),
    "tool": lambda ctx, ran: ctx.tool("late", ran.append, "tool"),
    "risky": lambda ctx, ran: ctx.options(risky=True).step("late", ran.append, "risky"),
    "send": lambda ctx, ran: ctx.send("other", "late"),
    "inbox": lambda ctx, ran: ctx.inbox(),
    "wait": lambda ctx, ran: ctx.inbox(wait=60),
    "ask": lambda ctx, ran: ctx.ask("ada", "late?"),
    "decide": lambda ctx, ran: ctx.decide("late"),
    "discover": lambda ctx, ran: ctx.discover("late"),
    "message": lambda ctx, ran: ctx.add_message("user", "late"),
    "artifact": lambda ctx, ran: ctx.artifacts.save("late.txt", "late"),
    "memory": lambda ctx, ran: ctx.memory.add("late"),
    "workspace": lambda ctx, ran: ctx.workspace.save(),
    "shared workspace": lambda ctx, ran: ctx.shared_workspace("team").write("late.txt", "late"),
    "successor": lambda ctx, ran: ctx.continue_as("other", queue="other"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_stopped_handler_can_call_nothing_of_its_context(app: App, name: str) -> None:
    """The call is refused with another `CancelledError`, before it has any effect."""
    started = asyncio.Event()
    ran: list[str] = []
    raised: list[BaseException] = []

    @app.task
    async def job(ctx: Context) -> str:
        await swallow(started)
        try:
            await CALLS[name](ctx, ran)
        except BaseException as error:  # noqa: BLE001 - a handler may catch too much
            raised.append(error)
        return "finished anyway"

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        assert await handle.cancel() is State.RUNNING
        await ends_cancelled(handle)
    assert [type(error) for error in raised] == [asyncio.CancelledError]
    assert ran == []
    assert await recorded_steps(app, handle) == {}
    assert await history(handle) == []


@pytest.mark.parametrize("ends", ["returns", "fails", "exits"])
async def test_the_time_out_decides_whatever_the_handler_makes_of_it(app: App, ends: str) -> None:
    started = asyncio.Event()

    @app.task(timeout=0.05, retry=Retry(max_attempts=2, base=0.0, never=(ValueError,)))
    async def job(ctx: Context) -> str:
        await swallow(started)
        if ends == "fails":
            raise ValueError("made of the time-out")
        if ends == "exits":
            raise SystemExit
        return "late"

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts, found.message) == (Reason.TIMEOUT, 2, "task 'job' ran longer than 0.05 s")
    assert ("made of the time-out" in found.traceback) is (ends == "fails")


async def test_the_next_attempt_after_a_swallowed_time_out_sees_no_late_step(app: App) -> None:
    attempts: list[int] = []

    @app.task(timeout=0.5, retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> list[int]:
        if ctx.attempt == 1:
            await swallow(asyncio.Event())
            with contextlib.suppress(BaseException):
                await ctx.step("work", attempts.append, ctx.attempt)
        else:
            await ctx.step("work", attempts.append, ctx.attempt)
        return attempts

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [2]


@pytest.mark.parametrize("form", ["async", "def", "group", "timeout", "child"])
async def test_a_swallowed_wait_parks_the_task(app: App, form: str) -> None:
    """The message arrives later, and the next run returns it."""
    parked: list[str] = []

    async def asks(ctx: Context) -> str:
        answer = None
        try:
            if form == "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(ctx.step("beside", asyncio.sleep, 0))
                    answer = await ctx.ask("ada", "go on?")
            elif form == "timeout":
                async with asyncio.timeout(60):
                    answer = await ctx.ask("ada", "go on?")
            else:
                answer = await ctx.ask("ada", "go on?")
        except BaseException:  # noqa: BLE001 - a handler may catch too much
            parked.append("swallowed")
        if form == "child":
            with contextlib.suppress(BaseException):
                await asyncio.gather(ctx.step("late", parked.append, "late"))
        return str(answer)

    def asks_sync(ctx: SyncContext) -> str:
        answer = None
        try:
            answer = ctx.ask("ada", "go on?")
        except BaseException:  # noqa: BLE001
            parked.append("swallowed")
        return str(answer)

    job: Any = app.task(asks_sync if form == "def" else asks)
    async with running_worker(app):
        handle = await job.enqueue()
        await wait_until(lambda: is_in(handle, State.WAITING, State.SCHEDULED), "the task waits")
        assert parked == ["swallowed"]
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == "yes"
    assert parked == (["swallowed", "late"] if form == "child" else ["swallowed"])


async def is_in(handle: TaskHandle[Any], *states: State) -> bool:
    return await handle.status() in states


async def test_a_swallowed_shutdown_releases_the_task(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        await swallow(started)
        return "finished anyway"

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await job.enqueue()
        await bounded(started.wait())
        worker.stop()
        worker.stop()
        await bounded(running)
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.QUEUED, 0, 0)


async def test_middleware_that_swallows_a_cancellation_does_not_decide(settings: Settings) -> None:
    started = asyncio.Event()

    class Swallowing(Middleware):
        async def run(self, ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return await call_next()
            except BaseException:  # noqa: BLE001
                return "from the middleware"

    async with App("swallows", settings=settings, middleware=[Swallowing()]) as app:

        @app.task
        async def job(ctx: Context) -> str:
            started.set()
            await anyio.sleep_forever()
            return "never"

        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(started.wait())
            await handle.cancel()
            await ends_cancelled(handle)


async def test_a_thread_that_swallows_its_cancellation_is_cancelled(app: App) -> None:
    started = asyncio.Event()
    ended = threading.Event()

    @app.task
    def job(ctx: SyncContext) -> str:
        with contextlib.suppress(BaseException):
            ctx.step("endless", swallow, started)
        with contextlib.suppress(BaseException):
            ctx.step("late", str, 1)
        ended.set()
        return "finished anyway"

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        await ends_cancelled(handle)
        assert await bounded(asyncio.to_thread(ended.wait, 60))
    assert "d:late" not in await recorded_steps(app, handle)


async def test_a_step_that_was_stopped_is_not_tried_again(app: App) -> None:
    started = asyncio.Event()
    tries: list[int] = []

    async def stubborn() -> None:
        tries.append(1)
        await swallow(started)
        raise ConnectionError

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.options(retry=Retry(max_attempts=5, base=0.0)).step("stubborn", stubborn)

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        await ends_cancelled(handle)
    assert tries == [1]


async def test_a_handler_that_calls_again_and_again_leaves_the_loop_to_others(app: App) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        await swallow(started)
        while not proceed.is_set():
            with contextlib.suppress(BaseException):
                await ctx.step("late", len, "x")
        return "finished anyway"

    @app.task
    async def other(ctx: Context) -> str:
        return "runs"

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        assert await bounded((await other.enqueue()).result()) == "runs"
        proceed.set()
        await ends_cancelled(handle)


# the race: a stop after the handler has returned


@pytest.mark.parametrize("stop", ["cancelled", "released"])
async def test_a_result_from_before_the_stop_is_kept(settings: Settings, stop: str) -> None:
    """The handler has returned, and its result is being stored, when the task is stopped."""
    returned, proceed = asyncio.Event(), asyncio.Event()

    class Holding(Middleware):
        async def settle(self, ctx: Context, settlement: Any, call_next: Callable[[], Awaitable[Any]]) -> None:
            returned.set()
            await proceed.wait()
            await call_next()

    async with App("swallows", settings=settings, middleware=[Holding()]) as app:

        @app.task
        async def job(ctx: Context) -> str:
            await ctx.step("once", len, "x")
            return "in time"

        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(returned.wait())
            if stop == "cancelled":
                assert await handle.cancel() is State.RUNNING
            else:
                worker.stop()
                worker.stop()
            proceed.set()
            assert await bounded(handle.result()) == "in time"
            worker.stop()
            await bounded(running)
        assert await handle.status() is State.SUCCEEDED


# agents


class Swallower(Agent[AgentState]):
    """An agent that swallows the stop of one of its methods, once."""

    where = ""
    started: asyncio.Event
    calls: list[str]

    async def _reach(self, method: str) -> None:
        self.calls.append(method)
        if method == self.where and self.calls.count(method) == 1:
            await swallow(self.started)

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        await self._reach("plan")
        return [PlanStep(key="one", title="one"), PlanStep(key="two", title="two")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        await self._reach(f"act {step.key}")
        if self.where == "inner" and step.key == "one":
            with contextlib.suppress(BaseException):
                answer = await ctx.ask("ada", "go on?")
                return str(answer)
            self.calls.append("swallowed")
        return step.key

    async def finish(self, ctx: Context, state: AgentState) -> dict[str, Any]:
        await self._reach("finish")
        return dict(state.results)


@pytest.mark.parametrize("where", ["plan", "act one", "finish"])
async def test_an_agent_that_swallows_its_cancellation_is_cancelled(app: App, where: str) -> None:
    started = asyncio.Event()
    calls: list[str] = []
    kind: Any = type("Here", (Swallower,), {"where": where, "started": started, "calls": calls})
    job: Any = app.agent(kind)

    async with running_worker(app):
        handle = await job.enqueue("work")
        await bounded(started.wait())
        await handle.cancel()
        await ends_cancelled(handle)
    assert calls[-1] == where
    types = [event.type for event in await history(handle)]
    assert types[-1] == {"plan": "started", "act one": "step_started", "finish": "step_completed"}[where]


async def test_a_swallowed_time_out_of_an_agent_completes_no_step(app: App) -> None:
    calls: list[str] = []
    kind: Any = type("Here", (Swallower,), {"where": "act one", "started": asyncio.Event(), "calls": calls})
    job: Any = app.agent(timeout=0.5, retry=Retry(max_attempts=2, base=0.0))(kind)

    handle = await job.enqueue("work")
    await work_off(app)
    assert await bounded(handle.result()) == {"one": "one", "two": "two"}
    assert calls == ["plan", "act one", "act one", "act two", "finish"]


async def test_a_swallowed_wait_of_an_agent_parks_it(app: App) -> None:
    calls: list[str] = []
    kind: Any = type("Here", (Swallower,), {"where": "inner", "started": asyncio.Event(), "calls": calls})
    job: Any = app.agent(kind)

    async with running_worker(app):
        handle = await job.enqueue("work")
        await wait_until(lambda: is_in(handle, State.WAITING, State.SCHEDULED), "the agent waits")
        assert calls == ["plan", "act one", "swallowed"]
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == {"one": "yes", "two": "two"}
