"""Methods of an agent that are called again: they see the conversation as it was, and build it up again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, TaskHandle
from perdure.worker.agents.journal.agent_events import Compacted

from tests.support.workers import bounded, history, steal, wait_until, work_off

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


class Chat(AgentState):
    """A state without fields of its own."""


class Talks(Agent[Chat]):
    """An agent whose model loop passes the whole conversation to each call of its model."""

    running: TaskHandle[Any]
    app: App
    calls: list[list[str]]
    seen: list[tuple[list[str], list[str], list[str]]]
    stop: str

    async def plan(self, ctx: Context, state: Chat) -> list[PlanStep]:
        await ctx.add_message("user", state.goal)
        return [PlanStep(key="talk", title="Talk")]

    async def act(self, ctx: Context, state: Chat, step: PlanStep) -> list[str]:
        kind = type(self)
        found = [one.fact for one in state.discoveries]
        kind.seen.append(([one.content for one in state.messages], [one.choice for one in state.decisions], found))

        async def model(messages: list[str]) -> str:
            kind.calls.append(messages)
            return f"answer {len(messages)}"

        for number in range(3):
            answer = await ctx.step("model", model, [one.content for one in state.messages])
            await ctx.add_message("assistant", answer)
            await ctx.discover(f"fact {number}")
            await ctx.decide(f"choice {number}")
            if number == 1 and len(kind.seen) == 1:
                await self.interrupt(ctx)
        return [one.content for one in state.messages]

    async def interrupt(self, ctx: Context) -> None:
        kind = type(self)
        if kind.stop == "crash":
            await ctx.checkpoint()
            await ctx._run.flush()
            await steal(kind.app, kind.running, expired=True)
            await asyncio.sleep(60)
        if kind.stop == "failure":
            raise RuntimeError("the network is down")
        if kind.stop == "wait":
            await ctx.ask("ada", "May I?", timeout=3600)

    async def finish(self, ctx: Context, state: Chat) -> list[str]:
        return [one.content for one in state.messages]


@pytest.mark.parametrize("stop", ["crash", "failure"])
async def test_a_model_loop_over_the_conversation_continues(app: App, stop: str) -> None:
    class Talker(Talks):
        """An agent of one test."""

    Talker.app, Talker.stop, Talker.calls, Talker.seen = app, stop, [], []
    agent = app.agent(Talker, name="talks", retry=AT_ONCE)
    async with app:
        Talker.running = await agent.enqueue("hello")
        await work_off(app)
        await work_off(app)
        result = await bounded(Talker.running.result())
        assert result == ["hello", "answer 1", "answer 2", "answer 3"]
        assert Talker.seen == [(["hello"], [], [])] * 2
        assert [len(messages) for messages in Talker.calls] == [1, 2, 3]
        types = [event.type for event in await history(Talker.running)]
        assert types.count("message_added") == 4
        assert types.count("discovered") == types.count("decided") == 3
        assert "withdrawn" not in types


async def test_a_message_of_another_party_stays_in_its_place(app: App) -> None:
    class Waits(Agent[Chat]):
        """An agent that asks a question in its step."""

        async def plan(self, ctx: Context, state: Chat) -> list[PlanStep]:
            return [PlanStep(key="talk", title="Talk")]

        async def act(self, ctx: Context, state: Chat, step: PlanStep) -> list[str]:
            await ctx.add_message("assistant", "may I?")
            answer = await ctx.ask("ada", "May I?", timeout=3600)
            await ctx.add_message("user", str(answer))
            return [one.content for one in state.messages]

        async def finish(self, ctx: Context, state: Chat) -> list[str]:
            return [one.content for one in state.messages]

    agent = app.agent(Waits, name="waits", on_message=None)
    async with app:
        running = await agent.enqueue("hello")
        await work_off(app)

        async def waits() -> bool:
            return (await running.record()).waits is not None

        await wait_until(waits, "the agent waits")
        await running.answer("question", "yes", by="ada")
        await work_off(app)
        assert await bounded(running.result()) == ["may I?", "yes"]


async def test_a_message_comes_back_before_a_summary_that_followed_it(app: App) -> None:
    """A compaction keeps the first instructions before its summary, whatever their numbers are."""
    runs: list[list[str]] = []

    class Sums(Agent[Chat]):
        """An agent whose messages are summarised within its step."""

        async def plan(self, ctx: Context, state: Chat) -> list[PlanStep]:
            return [PlanStep(key="talk", title="Talk")]

        async def act(self, ctx: Context, state: Chat, step: PlanStep) -> list[str]:
            await ctx.add_message("user", "rules")
            await ctx.add_message("assistant", "old")
            if not runs:
                kept = [message for message in state.messages if message.content == "rules"]
                event = Compacted(first=1, last=2, messages=2, summary="a summary", kept=tuple(kept))
                await ctx.record_event(event)
            await ctx.add_message("assistant", "new")
            runs.append([one.content for one in state.messages])
            if len(runs) == 1:
                raise RuntimeError("the network is down")
            return runs[-1]

        async def finish(self, ctx: Context, state: Chat) -> list[str]:
            return [one.content for one in state.messages]

    agent = app.agent(Sums, name="sums", retry=AT_ONCE)
    async with app:
        running = await agent.enqueue("hello")
        await work_off(app)
        assert await bounded(running.result()) == ["rules", "a summary", "new"]
        assert runs == [["rules", "a summary", "new"]] * 2


async def test_what_the_step_does_not_add_again_is_withdrawn(app: App) -> None:
    runs: list[int] = []

    class Changes(Agent[Chat]):
        """An agent whose code takes another path when it is called again."""

        async def plan(self, ctx: Context, state: Chat) -> list[PlanStep]:
            return [PlanStep(key="talk", title="Talk")]

        async def act(self, ctx: Context, state: Chat, step: PlanStep) -> list[str]:
            runs.append(1)
            await ctx.add_message("assistant", "first")
            if len(runs) == 1:
                await ctx.add_message("assistant", "second")
                await ctx.discover("a fact")
                raise RuntimeError("the network is down")
            return [one.content for one in state.messages]

        async def finish(self, ctx: Context, state: Chat) -> list[str]:
            assert state.discoveries == []
            return [one.content for one in state.messages]

    agent = app.agent(Changes, name="changes", retry=AT_ONCE)
    async with app:
        running = await agent.enqueue("hello")
        await work_off(app)
        assert await bounded(running.result()) == ["first"]
        gone = [event for event in await history(running) if event.type == "withdrawn"]
        added = [event.number for event in await history(running) if event.type in ("message_added", "discovered")]
        assert [event.data["numbers"] for event in gone] == [added[1:]]
