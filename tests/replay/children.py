"""Handlers of the replay suite that spawn children and await them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from perdure import App, ChildFailed, Context, Retry, TaskHandle
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal

ONCE = Retry(max_attempts=1, max_crashes=5)


def _no_child_twice(effects: Counter[str]) -> str:
    """Return what is wrong if a child of a call was spawned under two ids."""
    ids: dict[str, set[str]] = {}
    for name in effects:
        _, child, task_id = name.split()
        ids.setdefault(child, set()).add(task_id)
    twice = {child: found for child, found in ids.items() if len(found) > 1}
    return f"children with several ids: {twice}" if twice else ""


def _page(app: App, world: Journal) -> Task[Any, Any]:
    @app.task(retry=ONCE)
    async def page(ctx: Context, number: int, times: int = 1) -> int:
        world.call(f"page {number}*{times} {ctx.task_id}")
        if number == 13:
            raise LookupError("no such page")
        return number * 10 * times

    return page


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def spawned_and_joined(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> int:
        first = await ctx.spawn(page, 1)
        second = await ctx.spawn(page, 2)
        total: int = await ctx.join(second) + await ctx.step("between", _echo, 1) + await ctx.join(first)
        return total

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def gathered_in_a_window(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        found = await ctx.gather(page, (number for number in range(5)), limit=2)
        return await ctx.step("after", _echo, found)

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def children_as_completed(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        pages = ctx.as_completed(page, range(3), limit=2)
        return sorted([await ctx.step("seen", _echo, value) async for value in pages])

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def a_child_that_fails_is_caught(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[str]:
        found = [str(await ctx.gather(page, [1, 2], limit=1))]
        try:
            await ctx.gather(page, [13, 3], limit=1)
        except ChildFailed as error:
            found.append(f"{error.number} failed")
        try:
            await ctx.join(await ctx.spawn(page, 13, times=2))
        except ChildFailed:
            found.append("failed")
        kept = await ctx.gather(page, [(13, 4), (4, 4)], errors="keep")
        found.append(str([type(one).__name__ for one in kept]))
        return await ctx.step("after", _echo, found)

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, replays=True, expects=[30, 10])
def a_dead_child_is_replayed(app: App, world: Journal) -> Task[Any, Any]:
    @app.task(retry=ONCE)
    async def page(ctx: Context, number: int) -> int:
        if world.call(f"page {number}") == 1 and number == 3:
            raise LookupError("no such page yet")
        return number * 10

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        return await ctx.gather(page, [3, 1], errors="wait", limit=1)

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, expects=[60, 120])
def grandchildren(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def book(ctx: Context, number: int) -> int:
        world.call(f"book {number} {ctx.task_id}")
        return sum(await ctx.gather(page, [number, number + 1, number + 2][: number + 1]))

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        return [one + 30 for one in await ctx.gather(book, [1, 2])]

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def children_in_branches(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        async def branch(number: int) -> int:
            with ctx.scope(f"branch-{number}"):
                found = await ctx.gather(page, [number, number + 1])
                total: int = sum(found) + await ctx.step("one", _echo, 1)
                return total

        return list(await asyncio.gather(branch(1), branch(3)))

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True, allowed=_no_child_twice)
def results_of_other_tasks(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    async def start() -> TaskHandle[int]:
        return await page.enqueue(2)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> int:
        first = await page.enqueue(1)
        second = await ctx.step("start", start)
        total: int = await second.result() + await first.result()
        return total

    return parent


@handler(flaky=True, retried=False, enqueues=True, spawns=True)
def a_retry_spawns_what_is_not_joined(app: App, world: Journal) -> Task[Any, Any]:
    page = _page(app, world)

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[int]:
        found = await ctx.gather(page, [1, 2])
        child = await ctx.spawn(page, 3)
        if await ctx.step("attempt", _attempt, ctx.attempt) == 1 and ctx.attempt == 1:
            raise ConnectionResetError("once more")
        return [*found, await ctx.join(child)]

    return parent


async def _attempt(number: int) -> int:
    return number


async def _echo(value: Any) -> Any:
    return value
