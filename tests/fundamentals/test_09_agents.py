"""Agents: tasks with a plan and a state, which Perdure runs step by step."""

from __future__ import annotations

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker

pytestmark = pytest.mark.integration

ACTS: list[str] = []


class Notes(AgentState):
    """State of the agent: Perdure stores it with each finished step. `words` is an input, given to `enqueue`."""

    words: list[str]
    longest: str = ""


class Reader(Agent[Notes]):
    """Agent that finds the longest word. Its second step fails in the first attempt."""

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        """Return the steps. Called once."""
        return [PlanStep(key=word, title=f"measure {word}") for word in state.words]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
        """Do one step. Called once for each step that is not done."""
        ACTS.append(step.key)
        state.longest = max(state.longest, step.key, key=len)
        if ctx.attempt == 1 and step.key == "three":
            raise ConnectionError("the first attempt fails here")
        return len(step.key)

    async def finish(self, ctx: Context, state: Notes) -> str:
        """Return the result of the task. Called once, after the last step."""
        return state.longest


async def test_an_agent_plans_acts_and_finishes(app: App) -> None:
    """After a failure the agent continues at the step that failed; its state has what the steps before it stored."""
    reader = app.agent(Reader, retry=Retry(max_attempts=2, base=0))
    ACTS.clear()
    async with app:
        handle = await reader.enqueue("find the longest word", words=["one", "three", "six"])
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "three"
    assert ACTS == ["one", "three", "three", "six"]


async def test_the_same_goal_is_the_same_task(app: App) -> None:
    """Asked again for the same goal with the same inputs, the agent returns its recorded result. See `fresh=True`."""
    reader = app.agent(Reader, retry=Retry(max_attempts=2, base=0))
    ACTS.clear()
    async with app:
        first = await reader.enqueue("find the longest word", words=["one", "two"])
        async with Worker(app) as worker:
            await worker.run(burst=True)
            second = await reader.enqueue("find the longest word", words=["one", "two"])
            await worker.run(burst=True)
        assert second.id == first.id
        assert await second.result(timeout=10) == "one"
    assert ACTS == ["one", "two"]


async def test_the_log_of_an_agent_shows_its_plan_and_its_steps(app: App) -> None:
    """The state of an agent is the reduction of its event log, so it can be rebuilt as of any event."""
    reader = app.agent(Reader, retry=Retry(max_attempts=2, base=0))
    async with app:
        handle = await reader.enqueue("find the longest word", words=["one"])
        async with Worker(app) as worker:
            await worker.run(burst=True)
        types = [event.type async for event in handle.events(follow=False)]
    assert types[:4] == ["started", "planned", "step_started", "step_completed"]
