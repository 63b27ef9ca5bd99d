"""Event log: a record of what a task did, and why."""

from __future__ import annotations

from typing import Literal

import pytest
from perdure import App, Context, Event, Worker, register_event

pytestmark = pytest.mark.integration


async def test_the_event_log_shows_tools_discoveries_and_decisions_in_order(app: App) -> None:
    """`ctx.tool` is a step that is logged with its arguments and result. The others record facts and choices."""

    def search(question: str) -> list[str]:
        return [f"an answer to {question}"]

    @app.task
    async def answer(ctx: Context, question: str) -> str:
        found: list[str] = await ctx.options(reasoning="nothing is known yet").tool("search", search, question)
        await ctx.discover(found[0], source="the index")
        await ctx.decide("use the first", reasoning="it is the newest", alternatives=["search again"])
        return found[0]

    async with app:
        handle = await answer.enqueue("why?")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        events = [event async for event in handle.events(follow=False)]

    tool, discovery, decision = events
    assert (tool.type, tool.data["result"]) == ("tool_called", ["an answer to why?"])
    assert (discovery.type, discovery.data["source"]) == ("discovered", "the index")
    assert (decision.type, decision.data["reasoning"]) == ("decided", "it is the newest")


@register_event
class Priced(Event):
    """Price of a call, in cents."""

    type: Literal["priced"] = "priced"
    cents: int


async def test_a_program_defines_event_types_of_its_own(app: App) -> None:
    """Subclass `Event`, register it, and record it with `ctx.record_event`."""

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.record_event(Priced(cents=12))

    async with app:
        handle = await work.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        prices = [event.data["cents"] async for event in handle.events(follow=False) if event.type == "priced"]
    assert prices == [12]


async def test_events_are_followed_while_the_task_runs(app: App) -> None:
    """Without `follow=False`, `events` waits for new events, and ends with the task."""

    @app.task
    async def count(ctx: Context) -> None:
        for number in range(3):
            await ctx.discover(f"number {number}")

    async with app:
        handle = await count.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        facts = [event.data["fact"] async for event in handle.events() if event.type == "discovered"]
    assert facts == ["number 0", "number 1", "number 2"]
