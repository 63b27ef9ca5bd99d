"""Agents: the loop over their state, from goal to result, and from wherever a former run had come to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, Ephemeral, PlanStep, Retry, Settings
from pydantic import Field
from working import history, recorded_steps, soon, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=5, base=0.0)


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with App("agents", settings=settings.model_copy(update={"check_state": True})) as app:
        yield app


class Counting(AgentState):
    """words: what to count. total: so far. scratch: is never stored."""

    words: list[str] = Field(default_factory=list)
    total: int = 0
    scratch: Annotated[list[str] | None, Ephemeral] = None


class Counter(Agent[Counting]):
    """Counts the letters of words, one word a step."""

    acts: ClassVar[list[str]] = []
    fails: ClassVar[dict[str, int]] = {}

    async def plan(self, ctx: Context, state: Counting) -> list[PlanStep]:
        return [PlanStep(key=word, title=f"count {word}") for word in state.words]

    async def act(self, ctx: Context, state: Counting, step: PlanStep) -> int:
        self.acts.append(step.key)
        found = await ctx.step("length", len, step.key)
        await ctx.discover(f"{step.key} has {found} letters", source="len")
        state.total += found
        if self.fails.get(step.key, 0) >= step.attempts:
            raise ConnectionError(f"cut off in {step.key}")
        return found

    async def finish(self, ctx: Context, state: Counting) -> dict[str, Any]:
        return {"total": state.total, "discoveries": len(state.discoveries), "results": state.results}


@pytest.fixture
def counter() -> type[Counter]:
    class Fresh(Counter):
        acts: ClassVar[list[str]] = []
        fails: ClassVar[dict[str, int]] = {}

    return Fresh


async def test_an_agent_plans_acts_and_finishes(app: App, counter: type[Counter]) -> None:
    count = app.agent(name="count", retry=AGAIN)(counter)
    handle = await count.enqueue("count", words=["one", "three"])
    await work_off(app)
    assert await soon(handle.result()) == {"total": 8, "discoveries": 2, "results": {"one": 3, "three": 5}}
    told = [(event.type, event.step) for event in await history(handle) if event.number is not None]
    assert told == [
        ("started", None),
        ("planned", None),
        ("step_started", "one"),
        ("discovered", None),
        ("step_completed", "one"),
        ("step_started", "three"),
        ("discovered", None),
        ("step_completed", "three"),
        ("finished", None),
    ]
    assert set(await recorded_steps(app, handle)) == {"d:#plan", "d:#finish"}


async def test_what_failed_goes_on_where_it_was_and_nothing_is_applied_twice(app: App, counter: type[Counter]) -> None:
    counter.fails["three"] = 2
    count = app.agent(name="count", retry=AGAIN)(counter)
    handle = await count.enqueue("count", words=["one", "three", "five"])
    await work_off(app)
    assert (await soon(handle.result()))["total"] == 12
    assert counter.acts == ["one", "three", "three", "three", "five"]
