"""Handlers of the replay suite that wait for answers."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from perdure import Agent, AgentState, App, Context, PlanStep, SyncContext
from perdure.worker.errors import WaitTimedOut
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal
from tests.replay.rehearsal import Reply


async def _echo(value: Any) -> Any:
    return value


def _acting(world: Journal) -> Any:
    async def act(name: str) -> str:
        world.call(name)
        return name

    return act


@handler(answers=[Reply("approval", True)], expects=["asked", True, "paid"])
def answer_after_the_question(app: App, world: Journal) -> Task[Any, Any]:
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        asked = await ctx.step("ask", act, "asked")
        approved = await ctx.wait_for("approval", bool, who="ada")
        return [asked, approved, await ctx.step("pay", act, "paid")]

    return work


@handler(expects=[True, "paid", None])
def answer_before_the_question(app: App, world: Journal) -> Task[Any, Any]:
    """The second wait of the name does not get it."""
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def send() -> None:
            handle = await app.producer.find(ctx.task_id)
            assert handle is not None
            # as another program does: a task cannot answer its own question
            answered = handle.answer("approval", True, answer_id="early")
            await asyncio.get_running_loop().create_task(answered, context=contextvars.Context())

        await ctx.step("send", send)
        approved = await ctx.wait_for("approval", bool)
        paid = await ctx.step("pay", act, "paid")
        return [approved, paid, await ctx.wait_for("approval", bool, timeout=0.05, default=None)]

    return work


@handler(expects=["timed out", "default"])
def answers_that_do_not_come(app: App, world: Journal) -> Task[Any, Any]:
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        found = None
        try:
            await ctx.wait_for("approval", bool, timeout=0.05)
        except WaitTimedOut:
            found = await ctx.step("note", act, "timed out")
        return [found, await ctx.wait_for("approval", bool, timeout=0.05, default="default")]

    return work


@handler(answers=[Reply("approval", 1), Reply("approval", 2)], expects=[1, "between", 2])
def two_questions_of_one_name(app: App, world: Journal) -> Task[Any, Any]:
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        first = await ctx.wait_for("approval", int)
        between = await ctx.step("between", act, "between")
        return [first, between, await ctx.wait_for("approval", int)]

    return work


@handler(answers=[Reply("b/approval", "B"), Reply("a/approval", "A")], expects=["A", "B"])
def questions_in_branches(app: App, world: Journal) -> Task[Any, Any]:
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def page(name: str) -> Any:
            with ctx.scope(name):
                answer = await ctx.wait_for("approval", str, why=name)
                return await ctx.step("act", act, answer)

        return list(await asyncio.gather(page("a"), page("b")))

    return work


@handler(races=True, answers=[Reply("approval", "second")], expects=["late", "reminded", "second"])
def question_that_another_branch_overtakes(app: App, world: Journal) -> Task[Any, Any]:
    """Its wait is closed: the next answer is for the next question."""
    act = _acting(world)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def late() -> str:
            await ctx.sleep(0.15)
            return str(await ctx.step("remind", act, "reminded"))

        found = await ctx.first(answer=ctx.wait_for("other", str, token="order:1"), late=late())
        return [*found, await ctx.wait_for("approval", str)]

    return work


@handler(answers=[Reply("approval", "yes")], expects=["approval", "yes", "yes"])
def question_with_a_token_in_a_thread(app: App, world: Journal) -> Task[Any, Any]:
    def act(name: str) -> str:
        world.call(name)
        return name

    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> list[Any]:
        wait = ctx.open_wait("approval", str, token=f"order:{ctx.task_id}", shows={"amount": 9})
        told = ctx.step("notify", act, wait.id)
        return [told, wait.result(), ctx.step("act", act, wait.result())]

    return work


@handler(
    agent=True,
    arguments={"goal": "ask"},
    answers=[Reply("approval", "A"), Reply("approval", "B")],
    expects={"a": "A", "b": "B"},
)
def agent_that_asks_in_each_step(app: App, world: Journal) -> Any:
    act = _acting(world)

    class Asks(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("a", "b")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            answer = await ctx.wait_for("approval", str, who="ada", why=step.key)
            return await ctx.step("act", act, answer)

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return state.results

    return app.agent(Asks, name="asks", retry=RETRY)
