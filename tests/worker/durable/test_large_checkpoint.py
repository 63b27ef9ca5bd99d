"""Runs that resume from a large checkpoint: it is read in pages, while the handler asks for its steps."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, current_step
from perdure.queues.delivery.step_pages import PAGE
from perdure.worker.durable import CURRENT_RUN, CallNext, Middleware, StepCall

from tests.support.workers import bounded, history, recorded_steps, work_off

pytestmark = pytest.mark.integration

STEPS = 3 * PAGE
AGAIN = Retry(max_attempts=2, base=0.0)


class Seen(Middleware):
    """A middleware that counts the steps whose result came from a record."""

    def __init__(self) -> None:
        self.recorded: Counter[bool] = Counter()

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        try:
            return await call_next()
        finally:
            self.recorded[step.recorded] += 1


@pytest.fixture(params=[False, True], ids=["plain", "middleware"])
def seen(request: pytest.FixtureRequest) -> Seen | None:
    return Seen() if request.param else None


@pytest.fixture
async def app(settings: Settings, seen: Seen | None) -> AsyncIterator[App]:
    async with App("steps", settings=settings, middleware=[] if seen is None else [seen]) as app:
        yield app


def counted(number: int) -> str:
    return "page"


def numbered(number: int) -> str:
    return f"page-{number}"


def without_order(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.mark.parametrize("at_once", [False, True], ids=["in order", "at once"])
@pytest.mark.parametrize("name", [counted, numbered, without_order])
async def test_steps_of_a_large_checkpoint_run_once(
    app: App, seen: Seen | None, name: Callable[[int], str], at_once: bool
) -> None:
    calls: Counter[int] = Counter()
    known: list[int] = []

    async def read(number: int) -> int:
        calls[number] += 1
        return number

    @app.task(retry=AGAIN, durability="async")
    async def walk(ctx: Context) -> int:
        run = CURRENT_RUN.get()
        assert run is not None
        known.append(len(run.history.done))
        more = [*range(STEPS)] if ctx.attempt == 1 else [*range(STEPS + PAGE)]
        if at_once:
            found = await asyncio.gather(*(ctx.step(name(number), read, number) for number in more))
        else:
            found = [await ctx.step(name(number), read, number) for number in more]
        assert found == more
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return len(found)

    handle = await walk.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == STEPS + PAGE
    assert calls == Counter(range(STEPS + PAGE))
    assert known[0] == 0
    assert 0 < known[1] < 2 * PAGE  # the handler does not wait for the other pages
    if seen is not None:
        assert seen.recorded == {True: STEPS, False: STEPS + PAGE}


async def test_other_records_are_found_in_a_large_checkpoint(app: App) -> None:
    saved: list[Any] = []

    async def save() -> None:
        saved.append(current_step().saved)
        await current_step().save(len(saved))
        if len(saved) == 1:
            raise ConnectionError("cut off")

    @app.task(retry=AGAIN, durability="async")
    async def walk(ctx: Context) -> dict[str, Any]:
        for number in range(PAGE):
            await ctx.step("page", int, number)
            await ctx.decide(f"choice {number}")
        await ctx.artifacts.save("report", b"text")
        messages = [one.content for one in await ctx.inbox()]
        await ctx.send(ctx.task_id, "more")
        restored = {} if ctx.resumption is None else ctx.resumption.restored
        names = await ctx.resume_info().state()
        await ctx.step("part", save)
        return {
            "artifacts": [one.name for one in ctx.artifacts.list()],
            "messages": messages,
            "records": restored.get("records"),
            "names": names,
        }

    handle = await walk.enqueue()
    await handle.send("first")
    await work_off(app)
    found = await bounded(handle.result())
    assert found["artifacts"] == ["report"]
    assert found["messages"] == ["first"]
    assert found["records"] == 2 * PAGE + 3  # and an artifact, an inbox, a message
    assert found["names"] == sorted(["page", *(f"page#{number}" for number in range(2, PAGE + 1))])
    assert saved == [None, 1]
    events = await history(handle)
    assert [event.data["choice"] for event in events if event.type == "decided"] == [f"choice {n}" for n in range(PAGE)]
    assert sum(event.type == "message_sent" for event in events) == 1


async def test_an_agent_resumes_within_a_step_of_many_calls(app: App) -> None:
    calls: Counter[int] = Counter()

    async def read(number: int) -> int:
        calls[number] += 1
        return number

    class Reader(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="read", title="read"), PlanStep(key="write", title="write")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
            if step.key == "read":
                for number in range(STEPS):
                    await ctx.step("page", read, number)
                if ctx.attempt == 1:
                    raise ConnectionError("cut off")
            return 1

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return len(state.results)

    agent = app.agent(name="reader", retry=AGAIN, durability="async")(Reader)
    handle = await agent.enqueue(goal="read")
    await work_off(app)
    assert await bounded(handle.result()) == 2
    assert calls == Counter(range(STEPS))
    assert not [key for key in await recorded_steps(app, handle) if "page" in key]
