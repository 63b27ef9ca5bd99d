"""Steps of a plan: risky, failing, replaced and long ones, and the cost of a resumption."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import pytest
from perdure import Agent, AgentState, AlreadyDone, App, Context, PlanStep, Retry, Snooze, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Partition, TaskEvent
from perdure.queues.event_log import read_last_events
from perdure.worker.agents import live_state
from perdure.worker.agents.journal.history import check_state, state_at
from perdure.worker.agents.journal.json_patch import BadPatch
from perdure.worker.agents.journal.reducer import empty_state, reduce
from perdure.worker.agents.journal.registration import register_event
from perdure.worker.agents.journal.snapshot import encode_snapshot
from perdure.worker.agents.journal.state import KEPT
from perdure.worker.durable.journal.event import Event
from perdure.worker.durable.journal.parsing import parse_event
from perdure.worker.durable.journal.run_events import Notified
from perdure.worker.durable.steps.current import CURRENT_RUN
from perdure.worker.errors import StateError
from pydantic import Field

from tests.support.workers import (
    bounded,
    history,
    letter,
    recorded_steps,
    redis_command,
    steal,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("steps", check_state=True, lease=30.0)]

AGAIN = Retry(max_attempts=5, max_crashes=5, base=0.0)


class Work(AgentState):
    steps: list[str] = Field(default_factory=list)
    done: list[str] = Field(default_factory=list)


Act = Callable[["Doer", Context, Work, PlanStep], Any]


class Doer(Agent[Work]):
    """An agent whose steps call a function of the test."""

    risky: ClassVar[bool] = False
    acts: ClassVar[list[str]] = []

    async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
        return [PlanStep(key=key, title=key, risky=self.risky) for key in state.steps]

    async def act(self, ctx: Context, state: Work, step: PlanStep) -> str:
        self.acts.append(step.key)
        state.done.append(step.key)
        return await self.take(ctx, state, step) or step.key

    async def take(self, ctx: Context, state: Work, step: PlanStep) -> str | None:
        return None

    async def finish(self, ctx: Context, state: Work) -> dict[str, Any]:
        return {"done": state.done, "results": state.results, "plan": [(one.key, one.status) for one in state.plan]}


def agent(**body: Any) -> type[Doer]:
    return type("Doing", (Doer,), {"acts": [], **body})


async def cut_off(app: App, handle: TaskHandle[Any]) -> None:
    """Take the lease from this run: its later writes are refused, and the next worker gets the task."""
    await steal(app, handle, expired=True)


class Once:
    """Return a function that acts on its first call only."""

    def __init__(self) -> None:
        self.called = 0
        self.handle: TaskHandle[Any] | None = None

    def first(self) -> bool:
        self.called += 1
        return self.called == 1


# risky steps


def dies_after_acting(app: App, once: Once) -> dict[str, Any]:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str:
        if once.first():
            assert once.handle is not None
            await cut_off(app, once.handle)
        return f"acted {once.called}"

    return {"risky": True, "take": take}


async def test_an_interrupted_risky_step_is_verified_before_it_runs_again(app: App) -> None:
    once = Once()

    async def verify(self: Doer, ctx: Context, state: Work, step: PlanStep) -> AlreadyDone[str] | None:
        return AlreadyDone(f"found {step.key}") if step.key == "mail" else None

    kind = agent(**dies_after_acting(app, once), verify=verify)
    once.handle = await app.agent(name="risky", retry=AGAIN)(kind).enqueue("do", steps=["mail", "post"])
    await work_off(app)
    await work_off(app)
    result = await bounded(once.handle.result())
    assert result["results"] == {"mail": "found mail", "post": "acted 2"}
    assert kind.acts == ["mail", "post"]
    assert result["done"] == ["post"], "what the act that was cut off did to the state went with it"


async def test_an_interrupted_risky_step_with_in_doubt_fail_is_a_dead_letter(app: App) -> None:
    once = Once()
    asked: list[str] = []

    async def replan(self: Doer, ctx: Context, state: Work) -> None:
        asked.append("what now?")

    kind = agent(**dies_after_acting(app, once), in_doubt="fail", replan=replan)
    once.handle = await app.agent(name="risky", retry=AGAIN)(kind).enqueue("do", steps=["mail"])
    await work_off(app)
    await work_off(app)
    found = await letter(app, once.handle)
    assert found.reason is Reason.IN_DOUBT
    assert f"idempotency key {once.handle.id}:mail" in found.message
    assert kind.acts == ["mail"]
    assert asked == [], "that is for a person to find out"


async def test_a_recorded_plan_step_clears_a_quarantined_task(app: App) -> None:
    once = Once()
    kind = agent(**dies_after_acting(app, once))
    once.handle = await app.agent(kind, name="risky", retry=AGAIN).enqueue("do", steps=["mail", "post"])
    await work_off(app)
    await work_off(app)
    await bounded(once.handle.result())
    reported = [event.type for event in await history(once.handle)]
    assert reported.index("cleared") < reported.index("finished")


async def test_a_risky_step_is_logged_before_it_runs(app: App) -> None:
    stored: list[list[str]] = []

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        stored.append([event.type for event in await history(handle)])

    handle = await app.agent(name="risky")(agent(risky=True, take=take)).enqueue("do", steps=["mail"])
    await work_off(app)
    assert stored == [["started", "planned", "step_started"]]


# replans


async def test_replan_replaces_a_failed_step(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str | None:
        await ctx.step("look", str.upper, step.key)
        if step.key == "bad":
            raise ValueError("it cannot be done")
        return None

    async def replan(self: Doer, ctx: Context, state: Work) -> list[PlanStep] | None:
        failed = next((one for one in state.plan if one.key == state.current), None)
        if failed is None:
            return None
        state.done.append(failed.error or "")
        return [PlanStep(key="other", title="other"), PlanStep(key="last", title="last")]

    kind = agent(take=take, replan=replan)
    handle = await app.agent(name="other")(kind).enqueue("do", steps=["good", "bad", "never"])
    await work_off(app)
    result = await bounded(handle.result())
    assert result["done"] == ["good", "ValueError: it cannot be done", "other", "last"]
    assert result["plan"] == [["good", "done"], ["bad", "failed"], ["other", "done"], ["last", "done"]]
    assert (await handle.record()).attempts == 1
    assert set(await recorded_steps(app, handle)) == {"d:#plan", "d:#finish"}


async def test_a_failed_step_without_a_replan_is_retried_with_the_task(app: App) -> None:
    asked: list[str] = []

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        if step.attempts == 1:
            raise ValueError("not yet")

    async def replan(self: Doer, ctx: Context, state: Work) -> None:
        asked.append(await ctx.step("think", "; ".join, [one.error or "fine" for one in state.plan]))
        state.done.append("asked")

    handle = await app.agent(name="other", retry=AGAIN)(agent(take=take, replan=replan)).enqueue("do", steps=["a"])
    await work_off(app)
    assert (await bounded(handle.result()))["done"] == ["a", "asked"]
    assert asked == ["ValueError: not yet", "fine"], "what was thought of the failure is not taken for the next answer"
    assert set(await recorded_steps(app, handle)) == {"d:#plan", "d:#finish"}


async def test_a_replan_without_changes_logs_nothing(app: App) -> None:
    asked: list[str] = []

    async def replan(self: Doer, ctx: Context, state: Work) -> None:
        asked.append(await ctx.step("think", str.upper, state.current or ""))
        if len(asked) == 2:
            state.done.append("changed")

    handle = await app.agent(name="other")(agent(replan=replan)).enqueue("do", steps=["a", "b", "c"])
    await work_off(app)
    assert (await bounded(handle.result()))["done"] == ["a", "b", "changed", "c"]
    assert len(asked) == 3
    reported = [event.type for event in await history(handle)]
    assert reported.count("changed") == 1
    assert set(await recorded_steps(app, handle)) == {"d:#plan", "d:#finish"}


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (["a", "a"], "step keys must be unique, got 'a' twice"),
        (["a/b"], "without '/' and '#', got 'a/b'"),
        ([""], "1 to 200 characters"),
    ],
)
async def test_an_invalid_plan_is_refused(app: App, steps: Sequence[str], problem: str) -> None:
    once = Retry(max_attempts=1)
    handle = await app.agent(name="odd", retry=once)(agent()).enqueue("do", steps=list(steps))
    await work_off(app)
    assert problem in (await letter(app, handle)).message


# long steps


async def is_saved(app: App, handle: TaskHandle[Any] | None, data: bytes) -> bool:
    assert handle is not None
    return data in (await recorded_steps(app, handle)).values()


async def test_step_progress_is_saved_at_intervals_and_restored(app: App) -> None:
    once = Once()
    seen: list[dict[str, Any]] = []
    saved = asyncio.Event()

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        seen.append(dict(step.progress))
        step.progress["page"] = 7
        if once.first():
            assert once.handle is not None
            await wait_until(lambda: is_saved(app, once.handle, b'{"page":7}'), "saved progress")
            step.progress["page"] = 8
            await ctx.checkpoint()
            saved.set()
            await cut_off(app, once.handle)

    kind = agent(take=take, save_every=0.01)
    once.handle = await app.agent(name="long", retry=AGAIN)(kind).enqueue("do", steps=["read", "next"])
    await work_off(app)
    await work_off(app)
    await bounded(once.handle.result())
    assert saved.is_set()
    assert seen == [{}, {"page": 8}, {}]
    assert set(await recorded_steps(app, once.handle)) == {"d:#plan", "d:#finish"}


async def test_a_snoozing_step_does_not_fail_and_keeps_its_inner_steps(app: App) -> None:
    once = Once()
    calls: list[str] = []

    def part(name: str) -> None:
        calls.append(name)

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        await ctx.step("part", part, "a")
        if once.first():
            raise Snooze(0.0)

    handle = await app.agent(name="tired", retry=Retry(max_attempts=1))(agent(take=take)).enqueue("do", steps=["a"])
    await work_off(app)
    assert (await bounded(handle.result()))["done"] == ["a"]
    assert calls == ["a"]
    assert not [event for event in await history(handle) if event.type == "step_failed"]


async def test_inner_steps_are_numbered_per_plan_step(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str:
        return "".join([await ctx.step("part", str.lower, f"{step.key}{number}") for number in range(2)])

    handle = await app.agent(name="parts")(agent(take=take)).enqueue("do", steps=["A", "B"])
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"A": "a0a1", "B": "b0b1"}
    parts = [event.step for event in await history(handle) if event.number is None]
    assert parts == ["A/part", "A/part#2", "B/part", "B/part#2"]


# resumption


@pytest.mark.parametrize(("facts", "ends"), [(50, "fails"), (2500, "fails"), (2500, "dies")])
async def test_resuming_reads_a_bounded_number_of_events_however_long_the_history(
    app: App, monkeypatch: pytest.MonkeyPatch, facts: int, ends: str
) -> None:
    read: list[int] = []

    async def counted(*args: Any, **options: Any) -> list[TaskEvent]:
        found = await read_last_events(*args, **options)
        read.append(len(found))
        return found

    monkeypatch.setattr(live_state, "read_last_events", counted)
    once = Once()

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        for number in range(facts):
            await ctx.discover(f"fact {number}")
        for _ in range(2):
            await ctx.step("write", str.upper, "what was found")
        if once.first():
            if ends == "fails":
                raise ConnectionError
            await cut_off(app, handle)

    handle = await app.agent(name="long", retry=AGAIN)(agent(take=take)).enqueue("do", steps=["a", "b"])
    await work_off(app)
    await work_off(app)
    await bounded(handle.result())
    numbered = [event for event in await history(handle) if event.number is not None]
    assert len(numbered) >= 2 * facts
    assert sum(read) <= 60


async def test_a_task_with_a_snapshot_and_no_events_resumes(app: App) -> None:
    """Forks are such tasks."""
    count = app.agent(name="forked")(agent())
    handle = await count.enqueue("do", steps=["a", "b"])
    state = empty_state() | {"goal": "do", "steps": ["a", "b"], "done": ["a"], "results": {"a": "as it was"}}
    state["plan"] = [{"key": key, "title": key, "status": status} for key, status in (("a", "done"), ("b", "pending"))]
    partition: Partition = handle.partition
    entry = await redis_command(app, "HGET", partition.record(handle.id), "entry")
    fields = (await redis_command(app, "XRANGE", partition.ready, entry, entry))[0][1]
    await redis_command(app, "XDEL", partition.ready, entry)
    again = await redis_command(app, "XADD", partition.ready, "*", *fields, "again", "1")
    await redis_command(app, "HSET", partition.record(handle.id), "entry", again, "events", 70)
    snapshot = encode_snapshot(state, 70, "forked")
    await redis_command(app, "HSET", partition.steps(handle.id), "s:#state", snapshot)
    await work_off(app)
    result = await bounded(handle.result())
    assert (result["done"], result["results"]) == (["a", "b"], {"a": "as it was", "b": "b"})
    assert [event.number for event in await history(handle)] == [71, 72, 73]
    reduced = state
    for event in await history(handle):
        reduced = reduce(reduced, parse_event(event), event.number or 0)
    assert reduced["done"] == ["a", "b"]


async def test_a_fresh_replay_starts_from_the_goal(app: App) -> None:
    once = Once()

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        if step.key == "b" and once.first():
            raise ConnectionError

    one = Retry(max_attempts=1)
    kind = agent(take=take, snapshot_every=1)
    handle = await app.agent(kind, name="afresh", retry=one).enqueue("do", steps=["a", "b"])
    await work_off(app)
    found = await letter(app, handle)
    assert await replay(app.producer.gateway, found, Replay(fresh=True))
    await work_off(app)
    assert (await bounded(handle.result()))["done"] == ["a", "b"]
    assert kind.acts == ["a", "b", "a", "b"]
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


async def test_events_logged_during_a_restore_are_restored(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Webhook deliveries, for example, are logged at any time."""
    once, tells = Once(), Once()

    async def reading(*args: Any, **options: Any) -> list[TaskEvent]:
        run = CURRENT_RUN.get()
        if run is not None and run.history.events and tells.first():
            await run.log_event(Notified(what="resumed", how="webhook"), wait=True)
        return await read_last_events(*args, **options)

    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        if step.key == "b" and once.first():
            raise ConnectionError

    monkeypatch.setattr(live_state, "read_last_events", reading)
    handle = await app.agent(agent(take=take), name="planned", retry=AGAIN).enqueue("do", steps=["a", "b"])
    await work_off(app)
    assert (await bounded(handle.result()))["done"] == ["a", "b"]
    assert "notified" in [event.type for event in await history(handle)]
    assert len([event for event in await history(handle) if event.type == "attempt_failed"]) == 1
    numbers = [event.number for event in await history(handle) if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_memories_outlive_the_task(app: App) -> None:
    async def remember(self: Doer, ctx: Context, state: Work) -> list[str]:
        return [f"{key} is done" for key in state.results]

    handle = await app.agent(agent(remember=remember), name="rememberer").enqueue("do", steps=["a", "b"])
    await work_off(app)
    await bounded(handle.result())

    @app.task
    async def recall(ctx: Context) -> list[str]:
        return sorted(one.memory.text for one in await ctx.memory.search("done", everyone=True))

    recalling = await recall.enqueue()
    await work_off(app)
    assert await bounded(recalling.result()) == ["a is done", "b is done"]


async def test_an_agent_cannot_be_called_in_another_task(app: App) -> None:
    inner = app.agent(agent(), name="inner").task

    @app.task(retry=Retry(max_attempts=1))
    async def outer(ctx: Context) -> Any:
        return await inner(ctx, "do")

    handle = await outer.enqueue()
    await work_off(app)
    assert "agent 'inner' cannot be called in another task; enqueue it" in (await letter(app, handle)).message


async def test_an_event_keeps_the_agents_own_changes_to_a_list(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str:
        await ctx.discover(f"{step.key} began")
        state.discoveries = [one for one in state.discoveries if one.fact.startswith(step.key)]
        await ctx.discover(f"{step.key} ended")
        state.discoveries[0].fact = f"{step.key} was started"
        await ctx.discover(f"{step.key} is over")
        return ", ".join(one.fact for one in state.discoveries)

    handle = await app.agent(agent(take=take), name="own").enqueue("do", steps=["a", "b"])
    await work_off(app)
    result = await bounded(handle.result())
    assert result["results"] == {key: f"{key} was started, {key} ended, {key} is over" for key in "ab"}
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert [one["fact"] for one in past.state["discoveries"]] == ["b was started", "b ended", "b is over"]


async def test_a_list_that_the_agent_shortened_is_not_shortened_again(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str:
        for number in range(KEPT):
            await ctx.discover(f"fact {number}")
        del state.discoveries[:-1]
        await ctx.discover("the last")
        return ", ".join(one.fact for one in state.discoveries)

    handle = await app.agent(agent(take=take), name="short").enqueue("do", steps=["a"])
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"a": f"fact {KEPT - 1}, the last"}


@register_event
class Weighed(Event):
    type: Literal["weighed_in_a_test"] = "weighed_in_a_test"


async def test_changes_of_a_custom_event_join_those_of_the_agent(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        if step.key == "a":
            state.context["weights"] = {"apple": 1}
            return
        state.context["weights"]["pear"] = 2
        await ctx.record_event(Weighed(changes=({"op": "add", "path": "/context/weights/plum", "value": 3},)))

    async def finish(self: Doer, ctx: Context, state: Work) -> dict[str, Any]:
        return state.context

    handle = await app.agent(agent(take=take, finish=finish), name="weigher").enqueue("do", steps=["a", "b"])
    await work_off(app)
    assert await bounded(handle.result()) == {"weights": {"apple": 1, "pear": 2, "plum": 3}}
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert past.state["context"] == {"weights": {"apple": 1, "pear": 2, "plum": 3}}


async def test_an_event_that_does_not_fit_the_state_is_refused(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> str:
        problems = []
        for path in ("/done", "/nowhere/at/all"):
            ghost = {"op": "add", "path": "/context/ghost", "value": 1}
            try:
                await ctx.record_event(Weighed(changes=(ghost, {"op": "replace", "path": path, "value": 7})))
            except (StateError, BadPatch) as error:
                problems.append(type(error).__name__)
        await ctx.discover("it went on")
        return ", ".join(problems)

    handle = await app.agent(agent(take=take), name="misfit").enqueue("do", steps=["a"])
    await work_off(app)
    result = await bounded(handle.result())
    assert result["results"] == {"a": "StateMismatch, BadPatch"}
    assert result["done"] == ["a"]
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert (past.state["done"], past.state["context"], len(past.state["discoveries"])) == (["a"], {}, 1)


async def test_inner_steps_count_for_the_snapshot_interval(app: App) -> None:
    async def take(self: Doer, ctx: Context, state: Work, step: PlanStep) -> None:
        for number in range(60):
            await ctx.options(durability="async").step("part", str, number)

    handle = await app.agent(agent(take=take), name="parts").enqueue("do", steps=["a"])
    await work_off(app)
    await bounded(handle.result())
    assert "s:#state" in await recorded_steps(app, handle)
