"""Equal calls of a step by concurrent asyncio tasks: a warning, which is an error in these tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry

from tests.support.workers import bounded, letter, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("equal")]

Body = Callable[[Context, Callable[..., Awaitable[int]]], Awaitable[Any]]


async def handle_of(app: App, body: Body) -> Any:
    numbers = itertools.count()

    async def token(*_: object) -> int:
        await asyncio.sleep(0)
        return next(numbers)

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        await body(ctx, token)
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    return handle


async def branches(ctx: Context, token: Any) -> None:
    await asyncio.gather(*(ctx.step("token", token) for _ in range(3)))


async def late_branches(ctx: Context, token: Any) -> None:
    """The calls do not overlap: one has ended before the next one begins."""
    turns = [asyncio.Event() for _ in range(3)]

    async def branch(number: int) -> None:
        await turns[number].wait()
        await ctx.step("token", token, "same")
        if number < 2:
            turns[number + 1].set()
            await turns[2].wait()

    turns[0].set()
    await asyncio.gather(*(branch(number) for number in range(3)))


async def groups(ctx: Context, token: Any) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(ctx.step, "token", token, 1)


async def beside_the_handler(ctx: Context, token: Any) -> None:
    other = asyncio.create_task(ctx.step("token", token))
    await ctx.step("token", token)
    await other


async def before_the_handler(ctx: Context, token: Any) -> None:
    proceed = asyncio.Event()

    async def branch() -> None:
        await ctx.step("token", token)
        proceed.set()
        await asyncio.Event().wait()

    other = asyncio.create_task(branch())
    await proceed.wait()
    try:
        await ctx.step("token", token)
    finally:
        other.cancel()


async def in_one_scope(ctx: Context, token: Any) -> None:
    with ctx.scope("page"):
        await asyncio.gather(ctx.step("token", token), ctx.step("token", token))


@pytest.mark.parametrize(
    "body", [branches, late_branches, groups, beside_the_handler, before_the_handler, in_one_scope]
)
async def test_concurrent_equal_calls_are_reported(app: App, body: Body) -> None:
    found = await letter(app, await handle_of(app, body))
    assert "step 'token' is called with equal arguments by concurrent asyncio tasks" in found.message
    assert "ctx.scope" in found.message


async def loop(ctx: Context, token: Any) -> None:
    for _ in range(3):
        await ctx.step("token", token)


async def loop_with_timeouts(ctx: Context, token: Any) -> None:
    """`asyncio.wait_for` makes an asyncio task for each call up to Python 3.11."""
    await ctx.step("token", token)
    for _ in range(3):
        await asyncio.wait_for(ctx.step("token", token), 60)
        async with asyncio.timeout(60):
            await ctx.step("token", token)
        await asyncio.create_task(ctx.step("token", token))


async def loop_in_a_branch(ctx: Context, token: Any) -> None:
    async def branch(number: int) -> None:
        with ctx.scope(f"branch-{number}"):
            for _ in range(3):
                await ctx.step("token", token)
                await asyncio.wait_for(ctx.step("other", token), 60)

    await asyncio.gather(branch(1), branch(2))


async def distinct(ctx: Context, token: Any) -> None:
    async def branch(number: int) -> None:
        for page in range(2):
            await ctx.step("token", token, number, page)
            await ctx.step(f"token of {number}", token)
            await ctx.options(step_id=f"{number}-{page}").step("known", token)

    await asyncio.gather(*(branch(number) for number in range(3)))


async def in_rounds(ctx: Context, token: Any) -> None:
    for _ in range(2):
        await asyncio.gather(ctx.step("one", token), ctx.step("two", token))
        await ctx.step("one", token)


@pytest.mark.parametrize("body", [loop, loop_with_timeouts, loop_in_a_branch, distinct, in_rounds])
async def test_other_calls_are_not_reported(app: App, body: Body) -> None:
    assert await bounded((await handle_of(app, body)).result()) == "done"
