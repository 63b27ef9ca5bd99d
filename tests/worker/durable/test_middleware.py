"""Middleware: the order of hooks, their arguments, the effect of their errors, and no chain for unused hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    EnqueueCall,
    InvalidArguments,
    LeaseLost,
    Middleware,
    PlanStep,
    Retry,
    RetryLater,
    Settings,
    Settlement,
    State,
    StepCall,
    TaskFailed,
)
from perdure.queues.errors import ConfigurationError
from perdure.worker.middleware import build_chain

from tests.support.workers import bounded, expire_lease, partition_of, redis_command, running_worker, steal, work_off

ONCE = Retry(max_attempts=1)


async def innermost(*args: Any) -> str:
    return "innermost"


class Recorder(Middleware):
    """A middleware that records the arguments of each hook before and after the call."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name = name
        self.seen = seen

    async def enqueue(self, call: EnqueueCall, call_next: Any) -> str:
        self.seen.append((self.name, "enqueue", call.task))
        task_id: str = await call_next()
        self.seen.append((self.name, "enqueued", call.task))
        return task_id

    async def run(self, ctx: Context, call_next: Any) -> Any:
        self.seen.append((self.name, "run", ctx.task))
        result = await call_next()
        self.seen.append((self.name, "ran", result))
        return result

    async def step(self, ctx: Context, step: StepCall, call_next: Any) -> Any:
        self.seen.append((self.name, "step", step.key))
        result = await call_next()
        self.seen.append((self.name, "stepped", result))
        return result

    async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
        self.seen.append((self.name, "settle", settlement.state))
        await call_next()
        self.seen.append((self.name, "settled", settlement.state))


# chains


def test_a_hook_without_an_override_has_no_chain() -> None:
    class Other(Middleware):
        async def run(self, ctx: Context, call_next: Any) -> Any:
            return await call_next()

    assert build_chain([Middleware(), Other()], "step", innermost, shown=2) is None
    assert build_chain([Middleware(), Other()], "run", innermost, shown=1) is not None


async def test_call_next_may_be_called_once() -> None:
    class Twice(Middleware):
        async def run(self, ctx: Context, call_next: Any) -> Any:
            await call_next()
            return await call_next()

    chain = build_chain([Twice()], "run", innermost, shown=1)
    assert chain is not None
    with pytest.raises(RuntimeError, match=r"Twice\.run must call call_next\(\) once"):
        await chain(None)


def test_middleware_must_be_instances() -> None:
    with pytest.raises(ConfigurationError, match="must be instances of Middleware"):
        App("shop", middleware=[Recorder])  # type: ignore[list-item]  # the wrong type under test
    with pytest.raises(ConfigurationError, match="middleware of app 'shop' must be a list, got 3"):
        App("shop", middleware=3)  # type: ignore[arg-type]  # the wrong type under test


async def test_the_first_middleware_is_outermost_around_every_hook(settings: Settings) -> None:
    seen: list[Any] = []
    app = App("order", settings=settings, middleware=[Recorder("a", seen), Recorder("b", seen)])

    @app.task
    async def job(ctx: Context, number: int) -> int:
        return await ctx.step("double", lambda: 2 * number)

    async with app:
        handle = await job.enqueue(21)
        await work_off(app)
        assert await bounded(handle.result()) == 42
    assert seen[:4] == [
        ("a", "enqueue", "job"),
        ("b", "enqueue", "job"),
        ("b", "enqueued", "job"),
        ("a", "enqueued", "job"),
    ]
    assert seen[4:12] == [
        ("a", "run", "job"),
        ("b", "run", "job"),
        ("a", "step", "double"),
        ("b", "step", "double"),
        ("b", "stepped", 42),
        ("a", "stepped", 42),
        ("b", "ran", 42),
        ("a", "ran", 42),
    ]
    assert [what for _, what, _ in seen[12:]] == ["settle", "settle", "settled", "settled"]
    assert {state for _, _, state in seen[12:]} == {State.SUCCEEDED}


# enqueue


class Tracing(Middleware):
    """A middleware that adds a trace id to each task and records its arguments."""

    def __init__(self) -> None:
        self.calls: list[EnqueueCall] = []

    async def enqueue(self, call: EnqueueCall, call_next: Any) -> str:
        call.headers["trace"] = f"t{len(self.calls)}"
        self.calls.append(call)
        task_id: str = await call_next()
        return task_id


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


@pytest.fixture
async def traced(settings: Settings, tracing: Tracing) -> AsyncIterator[App]:
    async with App("traced", settings=settings, middleware=[tracing]) as app:

        @app.task
        async def show(ctx: Context, number: int) -> dict[str, str]:
            return dict(ctx.headers)

        yield app


async def test_enqueue_hooks_see_the_call_and_add_headers(traced: App, tracing: Tracing) -> None:
    show = traced.tasks["show"]
    handle = await show.options(task_id="one", headers={"user": "ada"}, timeout=5, queue="other").enqueue(7)
    await work_off(traced, queues=["other"])
    assert await bounded(handle.result()) == {"user": "ada", "trace": "t0"}
    (call,) = tracing.calls
    assert (call.task, call.arguments, call.queue) == ("show", {"number": 7}, "other")
    assert call.options == {"task_id": "one", "timeout": 5}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_enqueue_hooks_are_called_for_each_of_many_tasks(
    traced: App, tracing: Tracing, *, asynchronous: bool
) -> None:
    many: list[Mapping[str, Any]] = [{"number": number} for number in range(3)]

    async def each() -> AsyncIterator[Mapping[str, Any]]:
        for one in many:
            yield one

    show = traced.tasks["show"]
    handles = await show.enqueue_many(each() if asynchronous else many)
    handles += [handle async for handle in show.enqueue_stream(each() if asynchronous else many)]
    await work_off(traced)
    assert [await bounded(handle.result()) for handle in handles] == [{"trace": f"t{number}"} for number in range(6)]
    assert [call.arguments["number"] for call in tracing.calls] == [0, 1, 2, 0, 1, 2]


async def test_an_error_of_an_enqueue_hook_reaches_the_caller_and_nothing_is_stored(settings: Settings) -> None:
    class Refusing(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: Any) -> str:
            task_id: str = await call_next()
            if call.arguments["number"] == 2:
                raise PermissionError("no twos")
            return task_id

    async with App("refusing", settings=settings, middleware=[Refusing()]) as app:

        @app.task
        async def job(ctx: Context, number: int) -> None: ...

        with pytest.raises(PermissionError):
            await job.options(task_id="two").enqueue(2)
        with pytest.raises(PermissionError):
            await job.enqueue_many([{"number": 1}, {"number": 2}])
        assert await app.producer.find("two") is None
        assert await redis_command(app, "XLEN", partition_of(app).ready) == 0


async def test_an_enqueue_hook_must_call_call_next(settings: Settings) -> None:
    class Silent(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: Any) -> str:
            return "x"

    async with App("silent", settings=settings, middleware=[Silent()]) as app:

        @app.task
        async def job(ctx: Context) -> None: ...

        with pytest.raises(RuntimeError, match=r"Silent\.enqueue must call call_next"):
            await job.enqueue()


async def test_invalid_arguments_are_refused_with_enqueue_hooks(traced: App) -> None:
    show = traced.tasks["show"]
    with pytest.raises(InvalidArguments):
        await show.enqueue(1, 2)
    with pytest.raises(InvalidArguments):
        await show.enqueue("no number")


# run


async def test_an_error_of_a_run_hook_counts_as_an_error_of_the_handler(settings: Settings) -> None:
    class Limiting(Middleware):
        async def run(self, ctx: Context, call_next: Any) -> Any:
            await call_next()
            if ctx.attempt == 1:
                raise RetryLater(0.0)
            raise ValueError("too often")

    async with App("limited", settings=settings, middleware=[Limiting()]) as app:

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> int:
            return ctx.attempt

        handle = await job.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match="too often"):
            await bounded(handle.result())


async def test_a_run_hook_may_replace_an_error_of_the_handler_with_a_result(settings: Settings) -> None:
    class Default(Middleware):
        async def run(self, ctx: Context, call_next: Any) -> Any:
            try:
                return await call_next()
            except ZeroDivisionError:
                return ctx.headers.get("default", "none")

    async with App("default", settings=settings, middleware=[Default()]) as app:

        @app.task(retry=ONCE)
        async def job(ctx: Context) -> str:
            return str(1 / 0)

        handle = await job.options(headers={"default": "infinite"}).enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "infinite"


# step


class Steps(Middleware):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str | None, int, bool]] = []

    async def step(self, ctx: Context, step: StepCall, call_next: Any) -> Any:
        try:
            return await call_next()
        finally:
            self.calls.append((step.name, step.key, step.tool, step.attempt, step.recorded))


async def test_a_step_hook_receives_tool_and_try_and_whether_the_result_was_recorded(settings: Settings) -> None:
    steps = Steps()
    failures = 2

    def flaky() -> str:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("not yet")
        return "done"

    async with App("steps", settings=settings, middleware=[steps]) as app:

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> str:
            await ctx.step("page", len, "a")
            await ctx.step("page", len, "ab")
            found: str = await ctx.options(retry=Retry(max_attempts=3, base=0.0)).tool("search", flaky)
            if ctx.attempt == 1:
                raise OSError("again")
            return found

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "done"
    first = [
        ("page", "page", None, 1, False),
        ("page", "page#2", None, 1, False),
        ("search", "search", "search", 3, False),
    ]
    again = [
        ("page", "page", None, 1, True),
        ("page", "page#2", None, 1, True),
        ("search", "search", "search", 1, True),
    ]
    assert steps.calls == first + again


async def test_a_step_that_runs_again_with_other_arguments_is_not_recorded(settings: Settings) -> None:
    steps = Steps()
    async with App("steps", settings=settings, middleware=[steps]) as app:

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> int:
            found = await ctx.options(on_mismatch="rerun").step("count", len, "a" * ctx.attempt)
            if ctx.attempt == 1:
                raise OSError("again")
            return found

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 2
    assert [recorded for *_, recorded in steps.calls] == [False, False]


async def test_an_error_of_a_step_hook_is_raised_in_the_handler(settings: Settings) -> None:
    class Forbidding(Middleware):
        async def step(self, ctx: Context, step: StepCall, call_next: Any) -> Any:
            if step.name == "pay":
                raise PermissionError("not today")
            return await call_next()

    async with App("forbidding", settings=settings, middleware=[Forbidding()]) as app:

        @app.task(retry=ONCE)
        async def job(ctx: Context) -> str:
            try:
                await ctx.step("pay", len, "x")
            except PermissionError as error:
                return str(error)
            return "paid"

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "not today"


async def test_step_hooks_cover_the_plan_of_an_agent_and_nested_steps(settings: Settings) -> None:
    steps = Steps()
    app = App("agents", settings=settings, middleware=[steps])

    class Notes(AgentState):
        pass

    class Walker(Agent[Notes]):
        state_type = Notes

        async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
            return [PlanStep(key="look", title="Look"), PlanStep(key="go", title="Go")]

        async def act(self, ctx: Context, state: Notes, step: PlanStep) -> Any:
            return await ctx.step("part", len, step.key)

        async def finish(self, ctx: Context, state: Notes) -> str:
            return "there"

    walker = app.agent(Walker)
    async with app:
        handle = await walker.enqueue("home")
        await work_off(app)
        assert await bounded(handle.result()) == "there"
    assert [(name, key) for name, key, *_ in steps.calls] == [
        ("part", "look/part"),
        ("look", "look"),
        ("part", "go/part"),
        ("go", "go"),
    ]


# settle


class Settlements(Middleware):
    def __init__(self) -> None:
        self.all: list[Settlement] = []

    async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
        await call_next()
        self.all.append(settlement)


async def test_a_settle_hook_sees_the_outcome_of_every_attempt(settings: Settings) -> None:
    settlements = Settlements()
    async with App("settled", settings=settings, middleware=[settlements]) as app:

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> None:
            await ctx.step("one", len, "x")
            raise ValueError(f"attempt {ctx.attempt}")

        handle = await job.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed):
            await bounded(handle.result())
    first, last = settlements.all
    assert (first.state, first.stop, first.attempt, first.delay) == (State.SCHEDULED, "failed", 1, 0.0)
    assert (last.state, last.stop, last.attempt, last.reason) == (State.DEAD, "buried", 2, "attempts_exhausted")
    assert [str(one.error) for one in settlements.all] == ["attempt 1", "attempt 2"]
    assert first.handoff is None
    assert last.handoff is not None


async def test_an_unknown_task_is_settled_within_the_hooks_without_a_handler(settings: Settings) -> None:
    settlements = Settlements()
    brief = settings.model_copy(update={"unknown_task": Retry(max_attempts=1)})
    async with App("unknown", settings=brief, middleware=[settlements]) as app:
        handle = await app.producer.enqueue("nowhere", {}, queue=app.name)
        await work_off(app, queues=[app.name])
        with pytest.raises(TaskFailed):
            await bounded(handle.result())
    assert [(one.state, one.reason) for one in settlements.all] == [(State.DEAD, "unknown_task")]


async def test_a_task_runs_again_after_an_error_of_a_settle_hook(settings: Settings) -> None:
    failed = asyncio.Event()

    class Failing(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
            if not failed.is_set():
                failed.set()
                raise OSError("the metrics server is down")
            await call_next()

    app = App("failing", settings=settings.model_copy(update={"lease": 1.0}), middleware=[Failing()])

    @app.task
    async def job(ctx: Context) -> int:
        return ctx.crashes

    async with app:
        handle = await job.enqueue()
        async with running_worker(app):
            assert await bounded(handle.result()) == 1
    assert failed.is_set()


async def test_an_error_after_the_outcome_was_stored_has_no_effect(settings: Settings) -> None:
    class Late(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
            await call_next()
            raise OSError("too late")

    async with App("late", settings=settings, middleware=[Late()]) as app:

        @app.task
        async def job(ctx: Context) -> int:
            return ctx.crashes

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 0


async def test_a_settle_hook_sees_a_lost_lease(settings: Settings) -> None:
    started, stolen, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Watching(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
            try:
                await call_next()
            except LeaseLost:
                lost.set()
                raise

    app = App("watching", settings=settings.model_copy(update={"lease": 60.0}), middleware=[Watching()])

    @app.task
    async def job(ctx: Context) -> int:
        if not ctx.crashes:
            started.set()
            await stolen.wait()
        return ctx.crashes

    async with app:
        handle = await job.enqueue()
        async with running_worker(app):
            await bounded(started.wait())
            entry = await steal(app, handle)
            stolen.set()
            await bounded(lost.wait())
            await expire_lease(app, entry)
            assert await bounded(handle.result()) > 0
