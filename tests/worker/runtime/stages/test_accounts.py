"""Accounts of a task after its runs stopped: counts, errors and what needs attention, in resumptions and handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, TaskFailed, TaskHandle
from perdure.worker.durable.journal.handoff.document import Handoff
from perdure.worker.durable.journal.resumption import Resumption
from pydantic import SecretStr

from tests.support.workers import bounded, recorded_steps, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(check_state=True)]

TWICE = Retry(max_attempts=2, base=0.0)


async def handoff_of(app: App, handle: TaskHandle[Any]) -> Handoff:
    return Handoff.from_json(handle.id, (await recorded_steps(app, handle))["s:#handoff"])


async def test_the_restored_counts_of_an_agent_come_from_its_state(app: App) -> None:
    found: list[Resumption] = []

    class Writer(Agent[AgentState]):
        snapshot_every = 60

        async def plan(self, ctx: Context, state: AgentState) -> Sequence[PlanStep]:
            return [PlanStep(key=f"s{number}", title="write") for number in range(11)]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
            if ctx.resumption is not None:
                found.append(ctx.resumption)
                return
            await ctx.tool("ask", len, step.key)
            if step.key == "s10":
                raise ValueError("the model is away")
            for number in range(3):
                await ctx.add_message("assistant", f"{step.key} {number}")

        async def finish(self, ctx: Context, state: AgentState) -> None:
            return None

    handle = await app.agent(Writer, retry=TWICE).enqueue("a page")
    await work_off(app)
    await bounded(handle.result())
    restored = found[0].restored
    assert (restored["steps"], restored["messages"], restored["nested steps"]) == (10, 30, 1)
    assert "restored: 10 steps, 1 nested step, " in found[0].summary()
    assert "30 messages" in found[0].summary()


async def test_a_handoff_counts_the_tool_calls_of_the_whole_log(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1), durability="async")
    async def job(ctx: Context) -> None:
        await ctx.tool("list", len, "x")
        for number in range(210):
            await ctx.tool("read", len, "x" * number)
        raise ValueError("no more")

    handle = await job.enqueue()
    await work_off(app)
    handoff = await handoff_of(app, handle)
    assert {one.tool: one.calls for one in handoff.dependencies.tools} == {"read": 210, "list": 1}
    assert handoff.steps == 211


async def test_a_resumed_run_continues_the_counts_of_tool_calls(app: App) -> None:
    @app.task(retry=TWICE)
    async def job(ctx: Context) -> None:
        await ctx.tool("read", len, "x")
        if ctx.attempt == 2:
            await ctx.tool("read", len, "y")
        raise ValueError("no more")

    handle = await job.enqueue()
    await work_off(app)
    assert [one.calls for one in (await handoff_of(app, handle)).dependencies.tools] == [2]


async def test_a_succeeded_task_has_no_error(app: App) -> None:
    @app.task(retry=TWICE)
    async def job(ctx: Context) -> None:
        await ctx.step("one", len, "x")
        if ctx.attempt == 1:
            raise ValueError("the first attempt failed")

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert (await handle.record()).error is None


async def test_the_handoff_of_a_dead_letter_has_the_failed_step_the_error_and_the_command(app: App) -> None:
    async def pay(order: int) -> None:
        raise ValueError("the card is expired")

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.step("list", len, "x")
        await ctx.step("pay", pay, 1)

    handle = await job.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed):
        await bounded(handle.result())
    handoff = await handoff_of(app, handle)
    first, second, *_ = handoff.attention
    assert first == "step pay failed: ValueError: the card is expired"
    assert f"perdure dlq replay {handle.id}" in second


async def test_the_goal_of_a_function_is_its_name_with_its_arguments_without_secrets(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context, path: str, password: SecretStr, text: str) -> None:
        await ctx.step("one", len, "x")
        raise ValueError("no good")

    handle = await job.enqueue("src", SecretStr("open sesame"), "long " * 200)
    await work_off(app)
    goal = (await handoff_of(app, handle)).goal
    assert goal.startswith('job(path="src", password="**********", text="long long')
    assert len(goal) < 500


async def test_times_of_a_resumption_are_absolute(app: App) -> None:
    found: list[Resumption] = []

    @app.task(retry=TWICE)
    async def job(ctx: Context) -> None:
        await ctx.step("one", len, "x")
        if ctx.resumption is None:
            raise ValueError("not today")
        await asyncio.sleep(0)
        found.append(ctx.resumption)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    at = found[0].at
    assert at is not None
    assert f"resumed after a failure at {datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" in (
        found[0].summary()
    )
    assert " ago" not in found[0].text()
