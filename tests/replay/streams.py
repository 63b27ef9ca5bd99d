"""Handlers of the replay suite that emit items: what is visible in the end is what an undisturbed task shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import anyio
import anyio.from_thread
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, SyncContext, current_context, current_step
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, ServiceDown, handler
from tests.replay.journal import Journal
from tests.replay.rehearsal import Reply

TOKENS = ["a", "b", "c"]


async def _say(*tokens: str, to: str = "tokens") -> None:
    """Emit tokens, each in a write of its own as far as the writer is fast."""
    for token in tokens:
        await current_step().emit(token, to=to)
        await anyio.sleep(0.002)


@handler(
    expects="abc",
    streams={"output": ["begin", "page 1", "end"], "tokens": [*TOKENS, "page 1"], "facts": ["fact", "other"]},
)
def emits_in_steps_and_between(app: App, world: Journal) -> Task[Any, Any]:
    async def ask() -> str:
        world.call("ask")
        await _say("a", "b")
        await current_step().emit("fact", to="facts", key="1")
        await _say("c")
        return "abc"

    async def read(page: str) -> None:
        world.call("read")
        await _say(page)
        await current_step().emit("fact", to="facts", key="1")
        await current_step().emit("other", to="facts", key="2")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        await ctx.emit("begin")
        answer = await ctx.step("ask", ask)
        with ctx.scope("page-1"):
            await ctx.emit("page 1")
            await ctx.tool("read", read, "page 1")
        await ctx.emit("end")
        return answer

    return work


@handler(expects=3, streams={"output": ["begin", "end"], "tokens": ["x", "y", "z", "plain"]})
def emits_from_threads(app: App, world: Journal) -> Task[Any, Any]:
    async def ask() -> int:
        def speak() -> int:
            world.call("ask")
            for token in ("x", "y", "z"):
                anyio.from_thread.run(step.emit, token, "tokens")
            return 3

        step = current_step()
        return await anyio.to_thread.run_sync(speak)

    def plain() -> None:
        world.call("plain")
        SyncContext.current().emit("plain", "tokens")

    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> int:
        ctx.emit("begin")
        found = ctx.step("ask", ask)
        ctx.step("plain", plain)
        ctx.emit("end")
        return found

    return work


@handler(flaky=True, streams={"output": ["done"], "tokens": TOKENS})
def emits_in_tries_of_a_step(app: App, world: Journal) -> Task[Any, Any]:
    """A step fails after half of its items, and is called again in the same run."""

    async def ask() -> None:
        tries = world.call("ask")
        await _say("a", "b")
        if tries in (1, 2):
            raise ServiceDown("model", 503)
        await _say("c")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> None:
        await ctx.options(retry=Retry(max_attempts=8, base=0.0)).step("ask", ask)
        await ctx.emit("done")

    return work


@handler(flaky=True, streams={"output": ["begin", "done"], "tokens": ["first", *TOKENS]})
def emits_in_attempts_that_fail(app: App, world: Journal) -> Task[Any, Any]:
    async def first() -> None:
        world.call("first")
        await _say("first")

    async def ask() -> None:
        tries = world.call("ask")
        await _say("a", "b")
        if tries in (1, 2):
            raise ServiceDown("model", 503)
        await _say("c")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> None:
        await ctx.emit("begin")
        await ctx.step("first", first)
        await ctx.step("ask", ask)
        await ctx.emit("done")

    return work


@handler(expects="B", streams={"output": ["A is down", "B"], "tokens": ["A", "B", "B"]})
def emits_after_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    """What a failed step has emitted stays, since the handler continues from its failure."""

    async def ask(model: str) -> str:
        world.call(f"ask {model}")
        await _say(model)
        if model == "A":
            raise ServiceDown("model A", 503)
        await _say(model)
        return model

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            found = await ctx.step("ask A", ask, "A")
        except ServiceDown:
            await ctx.emit("A is down")
            found = await ctx.step("ask B", ask, "B")
        await ctx.emit(found)
        return found

    return work


def _one_charge_left(effects: Counter[str]) -> str:
    return "" if effects["ship"] >= 1 else "nothing was shipped"


@handler(flaky=True, undoes=True, allowed=_one_charge_left, streams={"output": ["charged"], "tokens": ["look", "pay"]})
def emits_in_forgotten_steps(app: App, world: Journal) -> Task[Any, Any]:
    async def look_up() -> None:
        await _say("look")

    async def charge() -> None:
        world.call("charge")
        await _say("pay")

    async def ship() -> None:
        if world.call("try to ship") == 1:
            raise ServiceDown("van", 503)
        world.call("ship")

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> None:
        await ctx.step("look up", look_up)
        await ctx.step("charge", charge)
        await ctx.emit("charged")
        try:
            await ctx.step("ship", ship)
        except ServiceDown:
            await ctx.forget("charge")
            raise

    return work


@handler(
    answers=[Reply("question", "yes")],
    expects="yes",
    streams={"output": ["begin", "yes", "awake"], "tokens": ["asking", "thanks"]},
)
def emits_before_and_after_waits(app: App, world: Journal) -> Task[Any, Any]:
    async def say(text: str) -> None:
        world.call(text)
        await _say(text)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        await ctx.emit("begin")
        await ctx.step("say", say, "asking")
        answer = str(await ctx.ask("ada", "Go?"))
        await ctx.emit(answer)
        await ctx.sleep(0.15)
        await ctx.emit("awake")
        await ctx.step("say", say, "thanks")
        return answer

    return work


@handler(expects=[1, 2], races=True, streams={"tokens": ["outer", "inner 1", "inner 2", "outer end"]})
def emits_in_steps_within_a_step(app: App, world: Journal) -> Task[Any, Any]:
    async def inner(number: int) -> int:
        world.call(f"inner {number}")
        await _say(f"inner {number}")
        return number

    async def outer() -> list[int]:
        world.call("outer")
        await _say("outer")
        found = [await current_context().step("inner", inner, number) for number in (1, 2)]
        await _say("outer end")
        return found

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[int]:
        return await ctx.options(nested="record").step("outer", outer)

    return work


@handler(
    expects=["left", "right"],
    races=True,
    streams={
        "output": ["left 1", "left 2", "right 1", "right 2", "end"],
        "tokens": ["left", "left", "right", "right"],
    },
)
def emits_in_branches(app: App, world: Journal) -> Task[Any, Any]:
    async def ask(name: str) -> str:
        world.call(name)
        await _say(name, name)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def branch(name: str) -> str:
            with ctx.scope(name):
                await ctx.emit(f"{name} 1")
                found = await ctx.step("ask", ask, name)
                await ctx.emit(f"{name} 2")
                return found

        found = list(await asyncio.gather(branch("left"), branch("right")))
        await ctx.emit("end")
        return found

    return work


@handler(
    agent=True,
    arguments={"goal": "talk"},
    expects="done",
    streams={"output": ["planning", "buy", "bought", "tell", "told", "finishing"], "tokens": ["buy", "tell"]},
)
def emits_in_an_agent(app: App, world: Journal) -> Any:
    async def shop(name: str) -> str:
        world.call(f"shop {name}")
        await _say(name)
        return name

    class State(AgentState):
        pass

    @app.agent(name="talker", retry=RETRY)
    class Talker(Agent[State]):
        async def plan(self, ctx: Context, state: State) -> list[PlanStep]:
            await ctx.emit("planning")
            return [PlanStep(key="buy", title="buy"), PlanStep(key="tell", title="tell")]

        async def act(self, ctx: Context, state: State, step: PlanStep) -> str:
            await ctx.emit(step.key)
            found = await ctx.step("shop", shop, step.key)
            await ctx.emit({"buy": "bought", "tell": "told"}[step.key])
            return found

        async def finish(self, ctx: Context, state: State) -> str:
            await ctx.emit("finishing")
            return "done"

    return Talker
