"""Prompts, notice and handoff document of an agent that was resumed, planned again or continued another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, Plan, PlanStep, Retry, TaskHandle
from perdure.worker.durable.journal.handoff.document import Handoff

from tests.support.workers import bounded, history, recorded_steps, steal, work_off

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


class Work(AgentState):
    """A state without fields of its own."""


async def brief_of(ctx: Context, state: Work) -> str:
    prompt = await ContextBuilder(window=20_000).build(ctx, state)
    return "\n".join(str(message) for message in prompt.messages)


async def test_a_call_that_was_repeated_and_answered_is_in_doubt_no_more(app: App) -> None:
    calls: list[str] = []
    briefs: list[str] = []

    class Fetches(Agent[Work]):
        """An agent whose worker is lost during a call."""

        async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
            return [PlanStep(key="read", title="Read")]

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> None:
            if calls:
                briefs.append(await brief_of(ctx, state))
            await ctx.tool("fetch", fetch, "s1")
            briefs.append(await brief_of(ctx, state))

        async def finish(self, ctx: Context, state: Work) -> None: ...

    async def fetch(region: str) -> str:
        calls.append(region)
        if len(calls) == 1:
            await steal(app, running, expired=True)
            await asyncio.sleep(60)
        return "a figure"

    agent = app.agent(Fetches, name="fetches", retry=AT_ONCE)
    async with app:
        running: TaskHandle[Any] = await agent.enqueue("figures")
        await work_off(app)
        await work_off(app)
        await bounded(running.result())
        before, after = briefs
        assert "was in flight: fetch" in before
        assert "after a crash" in after
        assert "was in flight: fetch" not in after


async def test_a_replaced_step_and_the_reason_are_in_prompts_and_handoff(app: App) -> None:
    briefs: list[str] = []

    class Changes(Agent[Work]):
        """An agent that changes its plan after the first step, and then fails."""

        async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
            return [PlanStep(key=key, title=f"Do {key}") for key in ("look", "guess", "write")]

        async def replan(self, ctx: Context, state: Work) -> Plan | None:
            if len(state.results) > 1 or state.replaced:
                return None
            return Plan(
                [PlanStep(key=key, title=f"Do {key}") for key in ("measure", "write")], why="a guess is too coarse"
            )

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> None:
            if step.key != "look":
                briefs.append(await brief_of(ctx, state))
                raise RuntimeError("no ruler")

        async def finish(self, ctx: Context, state: Work) -> None: ...

    agent = app.agent(Changes, name="changes", retry=Retry(max_attempts=1))
    async with app:
        running = await agent.enqueue("figures")
        await work_off(app)
        assert "`guess` Do guess (replaced by another plan: a guess is too coarse)" in briefs[-1]
        assert "`write` Do write (replaced" not in briefs[-1]
        document = Handoff.from_json(running.id, (await recorded_steps(app, running))["s:#handoff"])
        assert "`guess` Do guess was replaced by another plan: a guess is too coarse" in document.to_markdown()
        planned = [event.data for event in await history(running) if event.type == "planned"]
        assert [one.get("why", "") for one in planned] == ["", "a guess is too coarse"]


async def test_the_notice_of_a_successor_says_that_the_work_was_handed_over(app: App) -> None:
    class Takes(Agent[Work]):
        """An agent that continues the work of another one."""

        async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> None: ...

        async def finish(self, ctx: Context, state: Work) -> str:
            return "taken"

    taker = app.agent(Takes, name="takes")

    class Gives(Agent[Work]):
        """An agent that hands its work over."""

        async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
            return [PlanStep(key="give", title="Give")]

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> None:
            await ctx.decide("use the regions of Asia")
            await ctx.continue_as(taker, why="it is not mine")

        async def finish(self, ctx: Context, state: Work) -> str:
            return "given"

    giver = app.agent(Gives, name="gives")
    async with app:
        running = await giver.enqueue("figures")
        await work_off(app)
        assert await bounded(running.result()) == "taken"
        successor = await app.producer.find(f"{running.id}.h1")
        assert successor is not None
        [notice] = [event.data["text"] for event in await history(successor) if event.type == "resumed"]
        assert notice.startswith("This work was handed over at ")
        assert "shutdown" not in notice
        assert "Restored" not in notice


async def test_the_prompt_of_a_function_with_a_plan_names_its_first_step(app: App) -> None:
    briefs: list[str] = []

    @app.task(retry=AT_ONCE)
    async def offer(ctx: Context) -> None:
        await ctx.plan([PlanStep(key="fetch", title="Fetch the prices"), "send"])
        if ctx.attempt == 1:
            raise ValueError("not today")
        briefs.append(await brief_of(ctx, Work(goal="an offer")))

    async with app:
        handle = await offer.enqueue()
        await work_off(app)
        await bounded(handle.result())
    assert "Continue from step 1 of 2: `fetch` Fetch the prices." in briefs[0]
    assert "completed steps" not in briefs[0]
