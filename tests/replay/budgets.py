"""Handlers of the replay suite that use up a budget. A step that is cut off may be charged twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from perdure import App, Budget, Context, current_step
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal
from tests.replay.rehearsal import Reply


def _spending(world: Journal) -> Any:
    async def act(name: str, tokens: int) -> str:
        world.call(name)
        await current_step().spend(tokens=tokens)
        return name

    return act


@handler(answers=[Reply("budget", {"tokens": 10_000})], expects=["first", "second", "third"])
def budget_that_a_person_raises(app: App, world: Journal) -> Task[Any, Any]:
    act = _spending(world)

    @app.task(retry=RETRY, budget=Budget(tokens=100, seconds=10_000))
    async def work(ctx: Context) -> list[str]:
        first = await ctx.step("first", act, "first", 100)
        await ctx.spend(tokens=100)
        return [first, await ctx.step("second", act, "second", 1), await ctx.step("third", act, "third", 1)]

    return work


def _only_first(effects: Counter[str]) -> str:
    return "" if set(effects) == {"first"} else f"steps of a used-up budget ran: {effects}"


@handler(answers=[Reply("budget", "deny")], flaky=True, allowed=_only_first)
def budget_that_a_person_denies(app: App, world: Journal) -> Task[Any, Any]:
    act = _spending(world)

    @app.task(retry=RETRY, budget=Budget(tokens=100))
    async def work(ctx: Context) -> list[str]:
        first = await ctx.step("first", act, "first", 100)
        return [first, await ctx.step("second", act, "second", 1)]

    return work


def _continued(effects: Counter[str]) -> str:
    return "" if set(effects) == {"first", "cheap"} else f"not continued once: {effects}"


@handler(enqueues=True, flaky=True, allowed=_continued)
def budget_after_which_another_task_continues(app: App, world: Journal) -> Task[Any, Any]:
    act = _spending(world)

    @app.task(retry=RETRY)
    async def cheaper(ctx: Context) -> str:
        return str(await ctx.step("cheap", act, "cheap", 100))

    @app.task(retry=RETRY, budget=Budget(tokens=100, then="hand_off", to="cheaper"))
    async def work(ctx: Context) -> str:
        await ctx.step("first", act, "first", 100)
        return str(await ctx.step("second", act, "second", 1))

    return work
