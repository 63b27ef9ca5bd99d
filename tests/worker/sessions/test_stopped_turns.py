"""Turns that wait, are cancelled or are replayed late, with producers that send at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskCancelled
from pydantic import Field

from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


class Notes(AgentState):
    said: list[str] = Field(default_factory=list)


class Patient(Agent[Notes]):
    """Waits for an answer, or until it is cancelled, if the message asks for it."""

    running: ClassVar[asyncio.Event]

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key="act", title="act")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> list[str]:
        if state.goal == "ask":
            answers = await ctx.inbox(wait=3600, why="an answer")
            state.said += [str(one.content) for one in answers]
        if state.goal == "hang":
            self.running.set()
            await asyncio.sleep(3600)
        state.said.append(state.goal)
        return state.said

    async def finish(self, ctx: Context, state: Notes) -> list[str]:
        return list(state.results["act"])


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with App("test", settings=settings.model_copy(update={"lease": 30.0})) as app:
        app.agent(Patient, retry=Retry(max_attempts=1), on_message=None)
        Patient.running = asyncio.Event()
        yield app


async def test_a_turn_that_waits_holds_the_session_and_continues_with_its_answer(app: App) -> None:
    session = app.session(Patient, "ada")
    asking, later = await session.send("ask"), await session.send("later")
    handle = await app.producer.find(asking.task_id)
    assert handle is not None

    async def waits() -> bool:
        return await handle.status() in (State.WAITING, State.SCHEDULED)

    async with running_worker(app):
        await wait_until(waits, "the turn waits")
        record = await session.record()
        assert (record.status, record.turn, record.ended) == ("running", 1, 0)
        await handle.send("yes")
        assert await asking.result(30) == ["yes", "ask"]
        assert await later.result(30) == ["yes", "ask", "later"]


async def test_a_turn_that_is_cancelled_while_it_runs_is_passed_over_at_once(app: App) -> None:
    session = app.session(Patient, "ada")
    hanging, later = await session.send("hang"), await session.send("later")
    handle = await app.producer.find(hanging.task_id)
    assert handle is not None
    async with running_worker(app):
        await Patient.running.wait()
        await handle.cancel()
        assert await later.result(30) == ["later"]
        with pytest.raises(TaskCancelled):
            await hanging.result(30)


async def test_two_producers_that_send_at_the_same_time_get_turns_in_one_order(app: App, settings: Settings) -> None:
    async with App("test", settings=settings) as other, running_worker(app):
        other.agent(Patient, on_message=None)
        senders = [one.session(Patient, "ada") for one in (app, other)]
        turns = await asyncio.gather(*[senders[n % 2].send(f"m{n}", message_id=f"m{n // 2}") for n in range(20)])
        answers = {turn.number: await turn.result(30) for turn in turns}
    assert sorted(answers) == list(range(1, 11)), "each message id has one turn"
    assert [answers[number] for number in sorted(answers)] == [answers[10][:number] for number in range(1, 11)]
    assert (await senders[0].record()).status == "idle"
