"""Turns that wait, are cancelled or are replayed late, with producers that send at the same time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskCancelled, Worker
from perdure.context import Commitment
from perdure.worker.runtime.shared_settings import WorkerTimings
from pydantic import Field

from tests.support.runs import address_of
from tests.support.workers import redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("test", lease=30.0)]


class Notes(AgentState):
    said: list[str] = Field(default_factory=list)


class Patient(Agent[Notes]):
    """Waits for an answer, or until it is cancelled, if the message asks for it."""

    wake_when_due = True
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
        if state.goal == "promise":
            state.commitments.append(Commitment(what="call ada", due=datetime.now(UTC) + timedelta(hours=1)))
        state.said.append(state.goal)
        return state.said

    async def finish(self, ctx: Context, state: Notes) -> list[str]:
        return list(state.results["act"])


@pytest.fixture
def app(app: App) -> App:
    app.agent(Patient, retry=Retry(max_attempts=1), on_message=None)
    Patient.running = asyncio.Event()
    return app


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


async def test_a_turn_that_is_cancelled_while_it_waits_is_passed_over_at_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller dies between the cancellation of the task and the end of the turn, and cancels again."""
    session = app.session(Patient, "ada")
    asking, later = await session.send("ask"), await session.send("later")
    handle = await app.producer.find(asking.task_id)
    assert handle is not None
    await work_off(app)
    assert await handle.status() is State.WAITING

    async def die(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("perdure.queues.sessions.turns.end_turn", die)
        with pytest.raises(KeyboardInterrupt):
            await handle.cancel()
    assert (await session.record()).ended == 0
    assert await handle.cancel() is State.CANCELLED
    assert (await session.record()).ended == 1
    await work_off(app)
    assert await later.result(30) == ["later"]
    with pytest.raises(TaskCancelled):
        await asking.result(30)


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


async def test_the_end_of_a_turn_that_redis_has_lost_is_rebuilt_from_its_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session and task are in two slots: a failover may lose the end of the turn, and keep the outcome of its task."""
    session = app.session(Patient, "ada")
    address = address_of(app, "patient", session)
    key, due = address.session, address.partition.due
    first = await session.send("promise")
    found = await redis_command(app, "HGETALL", key)
    before = [part for pair in found.items() for part in pair] if isinstance(found, dict) else found
    await work_off(app)
    state, wake = await session.state(), await redis_command(app, "ZSCORE", due, address.digest)
    note = await redis_command(app, "HGET", key, "wake")
    await redis_command(app, "DEL", key, address.history)
    await redis_command(app, "HSET", key, *before)
    await redis_command(app, "ZADD", due, 1, address.digest)
    monkeypatch.setattr(Worker, "timings", WorkerTimings(clean_interval=0.02, clean_lock=0.02))

    async def ended() -> bool:
        return (await session.record()).status == "idle"

    async with running_worker(app):
        await wait_until(ended, "a worker ended the turn")
    assert await session.state() == state
    assert state.said == ["promise"]
    assert await redis_command(app, "ZSCORE", due, address.digest) == wake
    assert await redis_command(app, "HGET", key, "wake") == note
    assert b"call ada" in note
    assert await first.result(5) == ["promise"]
