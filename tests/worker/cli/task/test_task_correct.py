"""`perdure task correct`: values that fit the stored state are sent, others are refused with the names that exist."""

from __future__ import annotations

import json

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings

from tests.support.command_line import call
from tests.support.workers import wait_until, work_off

pytestmark = pytest.mark.integration


class Traveller(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        state.context["city"] = "Rome"
        return [PlanStep(key="book", title="book")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        if state.context["city"] == "Rome":
            raise ValueError("no flights to Rome")
        return str(state.context["city"])

    async def finish(self, ctx: Context, state: AgentState) -> dict[str, object]:
        return state.results


def test_a_dead_agent_is_corrected(settings: Settings, environment: None) -> None:

    async def work() -> None:
        app = App("test", settings=settings)
        app.agent(Traveller, name="traveller", retry=Retry(max_attempts=1))
        async with app:
            await work_off(app)

    task_id = call("enqueue", "traveller", "--queue", "test", "--args", '{"goal": "travel"}').ids[0]
    anyio.run(work)
    misspelt = call("task", "correct", task_id, "--field", "contxt.city=Oslo")
    assert misspelt.code == 2
    assert "contxt.city: the state has no field 'contxt'; it has 'goal', 'plan'" in " ".join(misspelt.err.split())
    assert call("task", "correct", task_id, "--field", "context.city").code == 2
    assert "current is read-only" in call("task", "correct", task_id, "--field", "current=book").err
    done = call("task", "correct", task_id, "--field", "context.city=Oslo", "--field", "context.n=1", "--json")
    assert json.loads(done.out)["changes"] == {"context.city": "Oslo", "context.n": 1}
    assert f"it is a dead letter; to resume it: perdure dlq replay {task_id}" in done.err
    assert call("dlq", "replay", task_id).code == 0
    anyio.run(work)
    assert json.loads(call("task", "result", task_id, "--json").out)["result"] == {"book": "Oslo"}
    assert "context.city, context.n" in call("task", "events", task_id).out
    assert call("task", "correct", task_id, "--field", "context.city=Bern").code != 0


def test_an_agent_that_asks_continues(settings: Settings, environment: None) -> None:

    async def work_until(state: str) -> None:
        app = App("test", settings=settings)
        app.agent(Traveller, name="traveller", retry=Retry(max_attempts=3, base=0.0), on_resume="ask")

        async def reached() -> bool:
            await work_off(app)
            handle = await app.producer.find(task_id)
            return handle is not None and (await handle.status()).value == state

        async with app:
            await wait_until(reached, f"the task is {state}")

    task_id = call("enqueue", "traveller", "--queue", "test", "--args", '{"goal": "travel"}').ids[0]
    anyio.run(work_until, "waiting")
    for command in ("why", "show"):
        said = " ".join(call("task", command, task_id).out.split())
        assert "waiting for a confirmation since " in said
        assert f"let it continue: perdure task correct {task_id} --continue" in said
    assert call("task", "correct", task_id).code == 2
    confirmed = call("task", "correct", task_id, "--continue", "--json")
    assert json.loads(confirmed.out)["changes"] == {}
    assert "sent confirmation " in confirmed.err
    both = call("task", "correct", task_id, "--continue", "--field", "context.city=Oslo")
    assert "sent correction " in both.err
    anyio.run(work_until, "succeeded")
    assert json.loads(call("task", "result", task_id, "--json").out)["result"] == {"book": "Oslo"}


def test_a_function_has_no_state_to_correct(settings: Settings, environment: None) -> None:

    async def work() -> None:
        app = App("test", settings=settings)
        app.task(retry=Retry(max_attempts=1))(count)
        async with app:
            await work_off(app)

    task_id = call("enqueue", "count", "--queue", "test").ids[0]
    anyio.run(work)
    refused = call("task", "correct", task_id, "--field", "a=1")
    assert (refused.code, "it is not an agent" in refused.err) == (1, True)


async def count(ctx: Context) -> None:
    await ctx.step("one", int, 1)
    raise ValueError("no")
