"""An agent with `on_resume="ask"` waits after an involuntary stop until a person confirms that it may continue."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, Settings, TaskHandle
from perdure.deadletter.replay import Replay, replay
from perdure.queues.inbox import send_correction
from perdure.queues.keys import GROUP
from perdure.worker.durable.run import Run
from perdure.worker.durable.stop_reasons import ParkReason
from perdure.worker.errors import TaskDefinitionError

from tests.support.workers import (
    FRESH,
    bounded,
    history,
    letter,
    partition_of,
    pending,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("careful", check_state=True, lease=30.0)]


async def lose_worker(app: App) -> None:
    """Let Redis take the worker for lost: its lease has expired, and Redis refuses its later writes."""
    for entry, *_ in await pending(app):
        await redis_command(app, "XCLAIM", partition_of(app).ready, GROUP, "dead", 0, entry, "IDLE", FRESH, "JUSTID")


class Careful(Agent[AgentState]):
    """An agent of three steps, whose runs end in steps as `stops` says: with a crash or with an error.

    `prompts` are the last parts of the prompts at the start of the steps. A step whose key is in `risky` is risky.
    """

    app: ClassVar[App]
    stops: ClassVar[list[tuple[str, str]]]
    risky: ClassVar[tuple[str, ...]] = ()
    prompts: ClassVar[list[str]]

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=key, title=key, risky=key in self.risky) for key in ("one", "two", "three")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        self.prompts.append((await ContextBuilder(window=8_000).build(ctx, state)).messages[-1].content)
        if self.stops and self.stops[0][0] == step.key:
            if self.stops.pop(0)[1] == "error":
                raise ValueError("out of order")
            await lose_worker(self.app)
            await ctx.checkpoint()
        return str(state.context.get("city", "Rome"))

    async def finish(self, ctx: Context, state: AgentState) -> list[Any]:
        assert state.waiting_for is None
        return [*state.results.values(), *(one.content.splitlines()[-2] for one in state.messages)]


async def work(app: App, handle: TaskHandle[Any]) -> None:
    """Run workers, one after the other is lost, until the task waits or has its outcome."""

    async def settled() -> bool:
        await work_off(app)
        return await status(handle) not in ("queued", "scheduled", "running")

    await wait_until(settled, "the task waits, or has its outcome")


async def stopped(app: App, *stops: tuple[str, str], retry: Retry | None = None, **members: Any) -> TaskHandle[Any]:
    """Return an agent whose worker has worked until it stopped for the first time, and again until it waits."""
    kind = type("Stopping", (Careful,), {"app": app, "stops": [*stops], "prompts": [], **members})
    retry = retry or Retry(max_attempts=9, max_crashes=9, base=0.0)
    handle = await app.agent(kind, name="careful", retry=retry, on_resume="ask").enqueue("work")
    await work(app, handle)
    return handle


async def logged(handle: TaskHandle[Any]) -> list[str]:
    """Return the events that concern the confirmation, in order."""
    kinds = ("waiting", "waited", "received", "corrected", "resumed")
    return [event.type for event in await history(handle) if event.type in kinds]


async def status(handle: TaskHandle[Any]) -> str:
    return (await handle.status()).value


@pytest.mark.parametrize("end", ["crash", "error"])
async def test_a_confirmation_without_changes_lets_the_agent_continue(app: App, end: str) -> None:
    prompts: list[str] = []
    handle = await stopped(app, ("two", end), prompts=prompts, risky=("two",))
    assert await status(handle) == "waiting"
    found = await handle.explain()
    assert (found.cause, found.waits_for) == ("confirmation", "confirmation")
    why = "crash" if end == "crash" else "failure"
    assert f"waiting for a confirmation since {found.sentence.split(' since ')[1][:5]}" in found.sentence
    assert f"(it resumes after a {why})" in found.sentence
    assert f"perdure task correct {handle.id} --continue" in (found.remedy or "")
    await handle.correct({}, by="ada", confirm=True)
    await work(app, handle)
    assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]
    assert prompts[-2].startswith(f"# Brief\n\nYou are resuming careful after a {why} and a wait for confirmation (20")
    assert f"- in doubt: `two` started and has no result; look up `{handle.id}:two`" in prompts[-2]
    assert "in doubt" not in prompts[-1]
    assert await logged(handle) == ["resumed", "waiting", "resumed", "waited"]
    assert await handle.pending_messages() == []


async def test_a_correction_confirms_and_applies(app: App) -> None:
    handle = await stopped(app, ("two", "crash"))
    await handle.correct({"context.city": "Oslo"})
    await work(app, handle)
    assert (await bounded(handle.result()))[:3] == ["Rome", "Oslo", "Oslo"]
    assert await logged(handle) == ["resumed", "waiting", "resumed", "waited", "corrected"]


async def test_a_message_confirms_and_is_delivered(app: App) -> None:
    handle = await stopped(app, ("two", "crash"))
    await handle.send("go")
    await work(app, handle)
    assert (await bounded(handle.result()))[3:] == ["go"]
    assert await logged(handle) == ["resumed", "waiting", "resumed", "waited", "received"]


async def test_a_message_from_before_the_question_confirms_nothing(app: App) -> None:
    class Written(Careful):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            if step.key == "two":
                await handles[0].send("early", message_id="early")
            return await super().act(ctx, state, step)

    Written.prompts = []
    Written.app, Written.stops = app, [("two", "crash")]
    patient = Retry(max_attempts=9, max_crashes=9, base=0.0)
    handles = [await app.agent(Written, name="careful", retry=patient, on_resume="ask").enqueue("work")]
    await work(app, handles[0])
    assert await status(handles[0]) == "waiting"


async def test_the_agent_continues_when_the_time_has_passed(app: App) -> None:
    handle = await stopped(app, ("two", "crash"), resume_timeout=0.001)
    async with running_worker(app):
        assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]
    assert await logged(handle) == ["resumed", "waiting", "resumed", "waited"]


async def test_a_run_that_is_killed_before_it_parks_has_asked_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    parks: list[float] = []
    park = Run.park

    async def killed(run: Run, reason: ParkReason, **options: Any) -> NoReturn:
        parks.append(reason.delay)
        if len(parks) == 1:
            await lose_worker(app)
        await park(run, reason, **options)

    monkeypatch.setattr(Run, "park", killed)
    handle = await stopped(app, ("two", "crash"))
    assert await status(handle) == "waiting"
    assert len(parks) == 2
    assert parks[1] <= parks[0]
    assert (await logged(handle)).count("waiting") == 1
    await handle.correct({}, confirm=True)
    await work(app, handle)
    assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]


async def test_a_message_that_arrives_before_the_park_is_not_missed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    park = Run.park

    async def late(run: Run, reason: ParkReason, **options: Any) -> NoReturn:
        await send_correction(app.producer.gateway, run.delivery.partition, run.id, {}, confirm=True, limit=1_000)
        await park(run, reason, **options)

    monkeypatch.setattr(Run, "park", late)
    handle = await stopped(app, ("two", "crash"))  # it may be parked still, and due at once

    async def continued() -> bool:
        await work_off(app)
        return await status(handle) == "succeeded"

    await wait_until(continued, "the task continues without another message")
    assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]


async def test_only_a_stop_after_another_closed_step_asks_again(app: App) -> None:
    handle = await stopped(app, ("two", "crash"), ("two", "crash"), ("two", "error"), ("three", "crash"))
    for times in (1, 2):
        assert await status(handle) == "waiting"
        assert (await logged(handle)).count("waiting") == times
        await handle.correct({}, confirm=True)
        await work(app, handle)
    assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]


async def test_a_replayed_dead_letter_asks(app: App) -> None:
    prompts: list[str] = []
    handle = await stopped(app, ("two", "error"), retry=Retry(max_attempts=1), prompts=prompts)
    assert await status(handle) == "dead"
    await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work(app, handle)
    assert await status(handle) == "waiting"
    await handle.correct({}, confirm=True)
    await work(app, handle)
    assert "after a replay and a wait for confirmation" in prompts[-2]
    assert "(attempt 2; last error: ValueError: out of order)" in prompts[-2]
    assert "dlq replay" not in prompts[-2], "that is done, and not the model's work"
    assert "in doubt" not in prompts[-2]


@pytest.mark.parametrize("changes", [{"context.city": "Oslo"}, {}])
async def test_a_correction_to_a_dead_letter_confirms_its_replay(app: App, changes: dict[str, Any]) -> None:
    stops = [("two", "error"), ("three", "error")]
    handle = await stopped(app, *stops, retry=Retry(max_attempts=1))
    await handle.send("hurry")  # a message is no decision to continue
    await handle.correct(changes, by="ada", confirm=True)
    await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work(app, handle)
    assert await status(handle) == "dead", "it did not ask, and failed in the next step"
    assert "waiting" not in await logged(handle)
    await handle.send("hurry")
    await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work(app, handle)
    assert await status(handle) == "waiting", "the correction was for the stop before"
    await handle.correct({}, confirm=True)
    await work(app, handle)
    city = "Oslo" if changes else "Rome"
    assert (await bounded(handle.result()))[:3] == ["Rome", city, city]


async def test_a_correction_before_the_death_confirms_nothing(app: App) -> None:
    class Corrected(Careful):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            if step.key == "two" and self.stops:
                await handles[0].correct({}, confirm=True)
                await asyncio.sleep(0.002)  # the clocks of both times have milliseconds
            return await super().act(ctx, state, step)

    Corrected.prompts = []
    Corrected.app, Corrected.stops = app, [("two", "error")]
    once = Retry(max_attempts=1)
    handles = [await app.agent(Corrected, name="careful", retry=once, on_resume="ask").enqueue("work")]
    await work(app, handles[0])
    await replay(app.producer.gateway, await letter(app, handles[0]), Replay())
    await work(app, handles[0])
    assert await status(handles[0]) == "waiting"


async def test_a_question_does_not_outlive_the_option(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    park = Run.park

    async def shortly(run: Run, reason: ParkReason, **options: Any) -> NoReturn:
        await park(run, replace(reason, delay=0.3), **options)

    monkeypatch.setattr(Run, "park", shortly)  # it is due again long before the time of the question
    handle = await stopped(app, ("two", "crash"))
    async with App("careful", settings=app.settings) as later:
        later.agent(type("Free", (Careful,), {"app": later, "stops": [], "prompts": []}), name="careful")
        async with running_worker(later):
            assert await bounded(handle.result()) == ["Rome", "Rome", "Rome"]


@pytest.mark.parametrize(
    ("members", "option", "problem"),
    [
        ({}, "wait", "on_resume must be 'ask' or None, got 'wait'"),
        ({"resume_timeout": 0}, "ask", "resume_timeout must be more than 0 seconds, got 0"),
        ({"resume_timeout": math.nan}, "ask", "resume_timeout must be more than 0 seconds, got nan"),
    ],
)
def test_wrong_options_are_refused(settings: Settings, members: dict[str, Any], option: Any, problem: str) -> None:
    with pytest.raises(TaskDefinitionError, match=problem):
        App("bad", settings=settings).agent(type("Bad", (Careful,), members), on_resume=option)
