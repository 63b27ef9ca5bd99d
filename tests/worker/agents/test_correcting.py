"""A person corrects the state of an agent: applied once, before the next step, or refused with the reason."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, TaskHandle
from perdure.deadletter.replay import Replay, replay
from pydantic import BaseModel, Field, field_validator

from tests.support.workers import bounded, history, letter, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(check_state=True, lease=30.0)]


class Trip(BaseModel):
    city: str = "Rome"
    days: int = 3


class Travel(AgentState):
    trip: Trip = Field(default_factory=Trip)
    note: str = ""

    @field_validator("note")
    @classmethod
    def _check(cls, value: str) -> str:
        if value == "broken":
            raise RuntimeError("a validator that fails")
        return value


class Planner(Agent[Travel]):
    """An agent that notes its destination in each of its steps."""

    during: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    """Corrections that arrive while a step runs."""

    async def plan(self, ctx: Context, state: Travel) -> list[PlanStep]:
        return [PlanStep(key=key, title=f"{key} in {state.trip.city}") for key in ("book", "pay")]

    async def act(self, ctx: Context, state: Travel, step: PlanStep) -> str:
        await ctx.step("look", str, f"{step.title} for {state.trip.days}")
        for changes in self.during.get(step.key, ()):
            await ctx.step("correct", correct, ctx.task_id, changes)
        return f"{step.title}: {state.trip.city} {state.trip.days}"

    async def finish(self, ctx: Context, state: Travel) -> dict[str, Any]:
        return {"results": state.results, "said": [one.content for one in state.messages], "context": state.context}


HANDLES: dict[str, TaskHandle[Any]] = {}


async def correct(task_id: str, changes: dict[str, Any]) -> int:
    """Correct the state as a person does, who is not within the task."""
    act = HANDLES[task_id].correct(changes, by="ada", message_id=str(changes))
    return (await asyncio.get_running_loop().create_task(act, context=contextvars.Context())).number


async def enqueue(app: App, kind: type[Agent[Any]], name: str = "planner", **options: Any) -> TaskHandle[Any]:
    handle = await app.agent(kind, name=name, **options).enqueue("travel")
    HANDLES[handle.id] = handle
    return handle


def planner(**during: list[dict[str, Any]]) -> type[Planner]:
    return type("Corrected", (Planner,), {"during": during})


async def logged(handle: TaskHandle[Any], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in await history(handle) if event.type == kind]


async def test_a_correction_applies_before_the_next_step_and_the_conversation_has_it(app: App) -> None:
    handle = await enqueue(app, planner(book=[{"trip.city": "```\nParis", "trip.days": "5", "context.by": {"x": 1}}]))
    await work_off(app)
    done = await bounded(handle.result())
    assert done["results"] == {"book": "book in Rome: Rome 3", "pay": "pay in Rome: ```\nParis 5"}
    assert done["context"] == {"by": {"x": 1}}
    (said,) = done["said"]
    assert said.startswith("The state was corrected by `ada`:\n````text\n")
    (event,) = await logged(handle, "corrected")
    assert (event["paths"], event["by"]) == (["trip.city", "trip.days", "context.by"], "ada")
    assert {"op": "replace", "path": "/trip/days", "value": 5} in event["changes"]
    assert await handle.pending_messages() == []
    assert await logged(handle, "received") == []


async def test_a_correction_before_the_first_run_is_known_to_the_plan(app: App) -> None:
    handle = await enqueue(app, Planner)
    await handle.correct({"trip": {"city": "Oslo", "days": 1}})
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"book": "book in Oslo: Oslo 1", "pay": "pay in Oslo: Oslo 1"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"town": "Paris"}, "town: the state has no field 'town'; it has 'goal', 'plan', "),
        ({"trip.city": "Paris", "trip.days": "many"}, "trip.days: Input should be a valid integer"),
        ({"trip.city.name": "Paris"}, "trip.city.name: there is no 'name'"),
        ({"context.a.b": 1}, "context.a.b: there is no 'a'"),
        ({"archive.steps": 7}, "archive.steps: archive is read-only"),
        ({"plan.0.title": "again"}, "plan: step 'book' is done and read-only"),
        ({"plan.1.status": "done"}, "plan: key, status, attempts, error of step 'pay' are read-only"),
        ({"plan": []}, "plan: it must keep its 2 steps"),
        ({"plan.2.title": "x"}, "plan.2.title: '2' is no index of a list of 2 items"),
        ({"note": "broken"}, "a validator that fails"),
    ],
)
async def test_what_does_not_fit_is_refused_and_nothing_of_it_is_applied(
    app: App, changes: dict[str, Any], why: str
) -> None:
    handle = await enqueue(app, planner(book=[changes]))
    await work_off(app)
    done = await bounded(handle.result())
    assert done["results"]["pay"] == "pay in Rome: Rome 3"
    (refused,) = await logged(handle, "correction_refused")
    assert refused["why"].startswith(why)
    assert (refused["wanted"], refused["by"]) == (changes, "ada")
    assert done["said"] == []


async def test_an_open_step_of_the_plan_is_corrected(app: App) -> None:
    handle = await enqueue(app, planner(book=[{"plan.1.title": "pay in cash"}]))
    await work_off(app)
    assert (await bounded(handle.result()))["results"]["pay"] == "pay in cash: Rome 3"


async def test_a_correction_that_comes_after_the_last_step_is_known_to_finish(app: App) -> None:
    handle = await enqueue(app, planner(pay=[{"context.late": 1}]), on_message=None)
    await work_off(app)
    done = await bounded(handle.result())
    assert (done["context"], done["said"]) == ({"late": 1}, [])


async def test_a_dead_letter_is_corrected_and_continues_after_its_replay(app: App) -> None:
    class Failing(Planner):
        async def act(self, ctx: Context, state: Travel, step: PlanStep) -> str:
            await ctx.step("look", str, state.trip.city)
            if state.trip.city == "Rome":
                raise ValueError("no flights to Rome")
            return state.trip.city

    handle = await enqueue(app, Failing, retry=Retry(max_attempts=1))
    await work_off(app)
    assert (await handle.status()).value == "dead"
    first = await handle.correct({"trip.city": "Lima"}, message_id="once")
    assert await handle.correct({"trip.city": "Lima"}, message_id="once") == first
    dead = await letter(app, handle)
    await replay(app.producer.gateway, dead, Replay())
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"book": "Lima", "pay": "Lima"}
    assert len(await logged(handle, "corrected")) == 1


async def test_a_waiting_agent_is_woken_and_its_question_stays_open(app: App) -> None:
    class Asking(Planner):
        async def act(self, ctx: Context, state: Travel, step: PlanStep) -> str:
            if step.key == "book":
                answer = await ctx.ask("ada", "which hotel?", timeout=3600)
                return f"{answer} in {state.trip.city}"
            return state.trip.city

    handle = await enqueue(app, Asking)
    await work_off(app)
    await handle.correct({"trip.city": "Bern"})
    await work_off(app)
    assert len(await logged(handle, "corrected")) == 1
    assert (await handle.status()).value == "waiting"
    await handle.answer("question", "the Grand", by="ada")
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"book": "the Grand in Bern", "pay": "Bern"}


async def test_a_function_ignores_a_correction(app: App) -> None:
    @app.task
    async def listen(ctx: Context) -> list[Any]:
        return [one.content for one in await ctx.inbox()]

    handle = await listen.enqueue()
    await handle.correct({"a": 1})
    await handle.send("hello")
    await work_off(app)
    assert await bounded(handle.result()) == ["hello"]
    with pytest.raises(ValueError, match="at least one"):
        await handle.correct({})
