"""Handlers of the replay suite that plan: with another plan in each run, scopes, long steps, and tools that repeat."""

from __future__ import annotations

import time
import uuid
from typing import Any

from perdure import App, Context, PlanStep, SyncContext
from perdure.worker.durable.run import LONG_STEP
from perdure.worker.durable.steps.current import CURRENT_RUN
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal


@handler(expects=["fetch", "long", "page", "sent"])
def plan_that_differs_in_each_run(app: App, world: Journal) -> Task[Any, Any]:
    """A model words its plan otherwise in each run: the first one is recorded."""

    def titled(key: str) -> PlanStep:
        return PlanStep(key=key, title=uuid.uuid4().hex)

    async def act(name: str) -> str:
        world.call(name)
        return name

    async def act_long(name: str) -> str:
        run = CURRENT_RUN.get()
        assert run is not None
        run.note_long_steps(time.monotonic() + LONG_STEP)
        world.call(name)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        names = await ctx.plan([titled("fetch"), titled("long")])
        found = [await ctx.step(names[0], act, "fetch"), await ctx.step(names[1], act_long, "long")]
        scope, last = await ctx.plan([titled("page"), titled("send")], why=uuid.uuid4().hex)
        with ctx.scope(scope):
            found.append(await ctx.step("read", act, "page"))
        await ctx.step(last, act, "send")
        return [*found, "sent"]

    return work


@handler(expects=5)
def plan_and_tools_in_a_thread(app: App, world: Journal) -> Task[Any, Any]:
    def look(number: int) -> int:
        world.call(f"look {number}")
        return 1

    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> int:
        names = ctx.plan(["look"] * 5)
        return sum(ctx.tool(name, look, 0) for name in names)

    return work
