"""Handlers of the replay suite that share values with a page, and make promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

from perdure import Agent, AgentState, App, Context, PlanStep, SyncContext, TaskHandle
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal
from tests.replay.rehearsal import Reply


async def _echo(value: Any) -> Any:
    return value


async def _page(app: App, ctx: Context) -> TaskHandle[Any]:
    """Return the handle with which a page reads and sets the values of the running task."""
    handle: TaskHandle[Any] | None = await app.producer.find(ctx.task_id)
    assert handle is not None
    return handle


def _one_value_of_each_round(effects: Counter[str]) -> str:
    rounds = Counter(name.split()[1] for name in effects if name.startswith("round "))
    return "" if set(rounds.values()) == {1} else f"values by round: {dict(rounds)}"


@handler(flaky=True, allowed=_one_value_of_each_round)
def value_that_a_page_changes(app: App, world: Journal) -> Task[Any, Any]:
    """The page sets another value in each run: what a run has read is what every later run reads."""

    async def use(turn: int, value: Any) -> None:
        world.call(f"round {turn} {value}")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        page = await _page(app, ctx)
        for turn in (1, 2, 3):
            await page.update("speed", world.call("page"))
            await ctx.step("use", use, turn, await ctx.values.get("speed"))
        return "done"

    return work


@handler(expects=["page", 3])
def value_that_a_page_replaces(app: App, world: Journal) -> Task[Any, Any]:
    """A run that starts again from its top does not set again what an earlier run has set."""

    async def replace(page: TaskHandle[Any]) -> None:
        await page.update("status", "page")
        world.call("page")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        page = await _page(app, ctx)
        for number in range(3):
            await ctx.values.set("status", number)
            await ctx.values.set("count", number + 1)
        await ctx.step("stored", _echo, 1)
        await ctx.step("replace", lambda: replace(page))
        await ctx.step("after", _echo, 2)
        return [await ctx.values.get("status"), await ctx.values.get("count")]

    return work


@handler(expects=[1, "set in a step", "later"])
def values_in_threads(app: App, world: Journal) -> Task[Any, Any]:
    def act(ctx: SyncContext) -> Any:
        world.call("act")
        ctx.values.set("inner", "set in a step")
        return ctx.values.get("first")

    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> list[Any]:
        ctx.values.set("first", 1)
        found = ctx.step("act", lambda: act(SyncContext.current()))
        ctx.values.set("last", "later")
        ctx.sleep(0.1)
        return [found, ctx.values.get("inner"), ctx.values.get("last")]

    return work


async def _promises(app: App, ctx: Context) -> list[Any]:
    """Return the events of promises, as the log has them."""
    page = await _page(app, ctx)
    names = ("promised", "promise_kept")
    return [[event.type, event.data["what"]] async for event in page.events(follow=False) if event.type in names]


_LOGGED = [["promised", "the list"], ["promised", "a call"], ["promise_kept", "the list"]]


@handler(answers=[Reply("approval", True)], expects=_LOGGED)
def promises_beside_a_wait(app: App, world: Journal) -> Task[Any, Any]:
    """Each is logged once, and kept once."""

    async def act(name: str) -> None:
        world.call(name)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> Any:
        await ctx.promise("ada", "the list")
        await ctx.step("act", act, "one")
        await ctx.promise("bob", "a call")
        await ctx.wait_for("approval", bool, who="eve")
        await ctx.keep("ada", "the list")
        await ctx.step("act", act, "two")
        return await ctx.step("logged", lambda: _promises(app, ctx))

    return work


@handler(
    agent=True,
    arguments={"goal": "promise"},
    answers=[Reply("many", 3)],
    expects=[["ada", "the list", True], ["bob", "a call", False]],
)
def promises_of_an_agent(app: App, world: Journal) -> Any:
    async def act(name: str) -> str:
        world.call(name)
        return name

    class Promising(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            await ctx.promise("ada", "the list")
            return [PlanStep(key="a", title="A"), PlanStep(key="b", title="B")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            await ctx.step("act", act, step.key)
            if step.key == "a":
                await ctx.promise("bob", "a call")
                return await ctx.ask("eve", "how many?", int, name="many")
            await ctx.keep("ada", "the list")
            return None

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return [[one.to, one.what, one.done] for one in state.commitments]

    return app.agent(Promising, name="promising", retry=RETRY)
