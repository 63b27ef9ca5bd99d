"""An error of the program fails at once, names the step and the remedy, and leaves nothing that hinders a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from perdure import App, Context, Retry, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from pydantic import BaseModel

from tests.support.workers import bounded, letter, recorded_steps, redis_command, work_off

pytestmark = pytest.mark.integration


async def test_a_wrong_call_of_a_risky_step_leaves_no_intent(app: App) -> None:
    """The function was not called, so a replay with the right arguments is in no doubt."""
    arguments: list[Any] = ["order"]

    async def pay(order: str, cents: int) -> str:
        return f"{order}: {cents}"

    @app.task(retry=Retry(max_attempts=5, base=0.0))
    async def job(ctx: Context) -> str:
        call: Callable[..., Any] = pay
        paid: str = await ctx.options(risky=True, in_doubt="fail").step("pay", call, *arguments)
        return paid

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert "step 'pay' calls" in found.message
    assert "missing a required argument: 'cents'" in found.message
    assert "i:pay" not in await recorded_steps(app, handle)
    arguments.append(5)
    assert await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    assert await bounded(handle.result()) == "order: 5"


async def test_a_wrong_call_within_a_step_names_the_inner_one(app: App) -> None:
    @app.task(retry=Retry(max_attempts=5, base=0.0))
    async def job(ctx: Context) -> None:
        async def outer() -> None:
            wrong: Callable[..., int] = len
            await ctx.step("inner", wrong, "a", "b")

        await ctx.step("outer", outer)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert "step 'outer/inner' calls len(obj, /) with other arguments: too many positional arguments" in found.message


class Page(BaseModel):
    title: str


class LongPage(Page):
    pages: int


@pytest.mark.parametrize("strict", [False, True])
async def test_a_result_that_no_longer_fits_is_an_error_at_its_step(app: App, strict: bool) -> None:
    """Its type is known from the call alone, so a new step before it has run, unless the task keeps the order."""
    declared: type[Page] = Page
    ran: list[str] = []

    def act(name: str) -> str:
        ran.append(name)
        return name

    @app.task(retry=Retry(max_attempts=2, base=0.0), strict_order=strict)
    async def job(ctx: Context) -> None:
        nonlocal declared

        def read() -> Any:
            ran.append("read")
            return Page(title="a")

        read.__annotations__["return"] = declared
        await ctx.step("one", act, "one")
        await ctx.step("two", act, "two")
        if ctx.attempt == 2:
            await ctx.step("new", act, "new")
        await ctx.step("read", read)
        await ctx.step("after", act, f"after {ctx.attempt}")
        declared = LongPage
        raise ConnectionError("once")

    handle: TaskHandle[None] = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 2)
    if strict:
        assert "step 'new' is new, but step 'read' of its scope was recorded" in found.message
        assert ran == ["one", "two", "read", "after 1"]
    else:
        assert "the recorded result of step 'read' does not fit" in found.message
        assert "LongPage, which its function declares now: pages: Field required; declare a type" in found.message
        assert ran == ["one", "two", "read", "after 1", "new"]
    assert await redis_command(app, "HEXISTS", handle.partition.steps(handle.id), "d:after") == 1
