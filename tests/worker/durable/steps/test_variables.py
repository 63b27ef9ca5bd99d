"""Context variables that a step sets: the handler does not see them, as a resumed run does not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import Any

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, current_step
from perdure.worker.durable.steps.variables import contained
from perdure.worker.runtime.health.loop_watchdog import stack_of_task

from tests.support.workers import BOUND, bounded, work_off

pytestmark = pytest.mark.integration

USER: ContextVar[str] = ContextVar("user", default="nobody")
TRACE: ContextVar[Any] = ContextVar("trace")
TOKENS: list[Token[str]] = []


class Odd:
    """A value that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


async def log_in() -> str:
    USER.set("ada")
    TRACE.set(Odd())
    return USER.get()


async def log_in_later() -> str:
    await asyncio.sleep(0)
    USER.set("ada")
    await asyncio.sleep(0)
    TRACE.set(1)
    return USER.get()


async def fail() -> str:
    USER.set("ada")
    TRACE.set(1)
    raise ConnectionError


async def hang() -> str:
    USER.set("ada")
    TRACE.set(1)
    await asyncio.sleep(BOUND)
    return ""


def plain() -> str:
    USER.set("ada")
    TRACE.set(1)
    return USER.get()


def returns_coroutine() -> Awaitable[str]:
    return log_in_later()


class Client:
    async def log_in(self) -> str:
        return await log_in()

    async def __call__(self) -> str:
        return await log_in()


async def give(function: Callable[[], Awaitable[str]]) -> str:
    return await function()


FUNCTIONS: list[Any] = [
    log_in,
    log_in_later,
    fail,
    hang,
    plain,
    returns_coroutine,
    Client().log_in,
    Client(),
    functools.partial(give, log_in),
]


def seen() -> tuple[str, Any]:
    return USER.get(), TRACE.get(None)


@pytest.mark.parametrize("before", [None, "eve"])
@pytest.mark.parametrize("function", FUNCTIONS)
async def test_a_handler_sees_the_same_variables_in_the_first_and_in_the_resumed_run(
    app: App, function: Any, before: str | None
) -> None:
    found: list[Any] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def job(ctx: Context) -> None:
        if before is not None:
            USER.set(before)
            TRACE.set(before)
        for _ in range(2):
            with contextlib.suppress(ConnectionError, TimeoutError):
                await ctx.options(timeout=0.05 if function is hang else None).step("log in", function)
            found.append(seen())
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert set(found) == {(before or "nobody", before)}
    assert len(found) == 4


async def test_a_function_that_sets_a_variable_later_is_noticed(app: App) -> None:
    """Its first call sets none, so the second one does not run in a copy."""
    calls: list[int] = []

    async def act() -> None:
        calls.append(1)
        if len(calls) > 1:
            USER.set("ada")
            if len(calls) > 2:
                TRACE.set("set")

    @app.task
    async def job(ctx: Context) -> list[Any]:
        found = []
        for _ in range(3):
            await ctx.step("act", act)
            found.append(list(seen()))
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [["nobody", None]] * 3


async def test_a_variable_that_a_step_resets_is_set_again(app: App) -> None:
    async def forget(_: int) -> None:
        if TOKENS:
            USER.reset(TOKENS.pop())

    @app.task
    async def job(ctx: Context) -> str:
        await ctx.step("forget", forget, 1)
        TOKENS.append(USER.set("eve"))
        await ctx.step("forget", forget, 2)
        return USER.get()

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "eve"


async def test_a_step_keeps_its_asyncio_task_and_its_own_variables(app: App) -> None:
    tasks: list[Any] = []

    async def inner() -> str:
        tasks.append(asyncio.current_task())
        USER.set("ada")
        await asyncio.sleep(0)
        async with anyio.create_task_group() as group:
            group.start_soon(asyncio.sleep, 0)
        with anyio.move_on_after(0.01) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        async with asyncio.timeout(BOUND):
            in_thread = await asyncio.to_thread(USER.get)
        in_task = await asyncio.create_task(give_user())
        return f"{USER.get()} {in_thread} {in_task} {current_step().key}"

    async def give_user() -> str:
        return USER.get()

    @app.task
    async def job(ctx: Context) -> list[str]:
        tasks.append(asyncio.current_task())
        return [await ctx.step("inner", inner) for _ in range(2)]

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["ada ada ada inner", "ada ada ada inner#2"]
    assert len(set(tasks)) == 1


async def test_a_cancelled_step_cleans_up_in_its_own_context(app: App) -> None:
    found: list[str] = []

    async def act() -> None:
        USER.set("ada")
        try:
            await asyncio.sleep(BOUND)
        finally:
            await asyncio.sleep(0)
            found.append(USER.get())

    @app.task
    async def job(ctx: Context) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ctx.step("act", act), 0.05)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await ctx.step("act", act)
        return USER.get()

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "nobody"
    assert found == ["ada", "ada"]


async def test_the_stack_of_a_step_in_a_copy_is_shown() -> None:
    async def waits_here() -> None:
        await asyncio.Event().wait()

    async def handler() -> None:
        await contained(waits_here())

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    try:
        assert "waits_here" in stack_of_task(task)
    finally:
        task.cancel()


async def test_a_step_of_a_plan_does_not_set_variables(app: App) -> None:
    found: list[str] = []

    class Planner(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            USER.set("planned")
            return [PlanStep(key="one", title="One"), PlanStep(key="two", title="Two")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            found.append(USER.get())
            if step.key == "two" and ctx.attempt == 1:
                raise ConnectionError
            USER.set("acted")
            return "done"

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return USER.get()

    handle = await app.agent(name="planner", retry=Retry(max_attempts=2, base=0))(Planner).enqueue("x")
    await work_off(app)
    assert await bounded(handle.result()) == "nobody"
    assert found == ["nobody"] * 3
