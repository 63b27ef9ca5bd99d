"""An agent for tests of pages: it decides with reasons, asks a model, pays for it and saves an artifact."""

from __future__ import annotations

from typing import Any, ClassVar

from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, TaskHandle
from perdure.worker.agents.context.prompt import Prompt
from perdure.worker.durable.steps.current import current_step

from tests.support.workers import work_off

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m'\"]]>&amp;"


class Trip(AgentState):
    city: str = "Rome"


class Travels(Agent[Trip]):
    """An agent that asks a model in each of its steps."""

    builder: ClassVar[ContextBuilder] = ContextBuilder(window=20_000, identity="You book trips.", memory=False)
    fail: ClassVar[str] = ""
    said: ClassVar[str] = HOSTILE

    async def plan(self, ctx: Context, state: Trip) -> list[PlanStep]:
        return [PlanStep(key=key, title=f"{key} {self.said}") for key in ("book", "pay")]

    async def act(self, ctx: Context, state: Trip, step: PlanStep) -> str:
        await ctx.decide(f"go to {state.city}", reasoning=f"it is near {self.said}")
        answer = await self.builder.ask(ctx, state, model)
        if step.key == self.fail:
            raise RuntimeError("the till is closed")
        state.city = "Oslo"
        await ctx.artifacts.save("ticket.html", f"<script>{self.said}</script>")
        return str(answer)

    async def finish(self, ctx: Context, state: Trip) -> str:
        return state.city


async def model(prompt: Prompt) -> str:
    await current_step().spend(input_tokens=prompt.total, output_tokens=7, usd=0.001, model="m-1")
    return f"answer {HOSTILE}"


async def travelled(app: App, kind: type[Agent[Any]] = Travels, goal: str = "travel") -> TaskHandle[Any]:
    handle = await app.agent(kind, name="travels", retry=Retry(max_attempts=1)).enqueue(goal)
    await work_off(app)
    return handle
