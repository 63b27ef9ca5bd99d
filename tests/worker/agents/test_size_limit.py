"""Agents whose state reaches the limit: room is made, or they wait for an operator; they do not die of it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskHandle
from perdure.deadletter.replay import Replay, replay
from perdure.worker.agents.journal.compaction import compact_state
from perdure.worker.agents.journal.history import check_state, state_at
from perdure.worker.errors import StateError
from pydantic import Field

from tests.support.workers import bounded, history, letter, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("limited", payload_limit=20_000, check_state=True, lease=30.0)]


class Bag(AgentState):
    sizes: list[int] = Field(default_factory=list)
    own: str = ""


class Collector(Agent[Bag]):
    """An agent whose steps have results of given sizes. A negative size goes into the context."""

    snapshot_every: ClassVar[int] = 5
    acts: ClassVar[list[str]] = []

    async def plan(self, ctx: Context, state: Bag) -> list[PlanStep]:
        return [PlanStep(key=f"s{n}", title=f"step {n}") for n in range(len(state.sizes))]

    async def act(self, ctx: Context, state: Bag, step: PlanStep) -> str:
        self.acts.append(step.key)
        size = state.sizes[int(step.key[1:])]
        if size < 0:
            state.context["notes"] = "x" * -size
        return "x" * max(0, size)

    async def finish(self, ctx: Context, state: Bag) -> dict[str, Any]:
        first = await ctx.recall_step("s0")
        assert first is not None
        return {"archived": state.archive.steps, "first": len(first.result), "last": sorted(state.results)[-1]}


@pytest.fixture
def collector() -> type[Collector]:
    class Fresh(Collector):
        acts: ClassVar[list[str]] = []

    return Fresh


async def compact(app: App, handle: TaskHandle[Any], *drop: str) -> Any:
    return await compact_state(
        app.producer.gateway,
        handle.partition,
        handle.id,
        keep_steps=1,
        keep_messages=10,
        drop_context=drop,
        payload_limit=20_000,
    )


async def test_results_that_would_exceed_the_limit_make_room_for_each_other(
    app: App, collector: type[Collector]
) -> None:
    handle = await app.agent(name="collect")(collector).enqueue("all", sizes=[6000] * 9)
    await work_off(app)
    result = await bounded(handle.result())
    assert (result["first"], result["last"]) == (6000, "s8")
    assert result["archived"] >= 6
    assert collector.acts == [f"s{n}" for n in range(9)]
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


async def settled(app: App, handle: TaskHandle[Any]) -> Any:
    return await redis_command(app, "HGET", handle.partition.record(handle.id), "settled")


async def until_parked(app: App, handle: TaskHandle[Any], before: Any = None) -> None:
    async def is_parked() -> bool:
        return await handle.status() is State.WAITING and await settled(app, handle) != before

    await wait_until(is_parked, "the task is parked")


FULL = [5000, -15_000, 6000, 10]
"""Sizes that do not fit the limit in step s2, whatever is archived: the notes stay."""


async def test_a_state_that_stays_too_large_parks_the_agent_until_it_is_compacted(
    app: App, collector: type[Collector], log: list[str]
) -> None:
    handle = await app.agent(name="collect")(collector).enqueue("all", sizes=FULL)
    async with running_worker(app):
        await until_parked(app, handle)
        record = await handle.record()
        assert (record.waits, record.attempts, record.crashes) == ("compaction", 0, 0)
        (waiting,) = [event for event in await history(handle) if event.type == "waiting"]
        assert "largest fields: context (15,0" in waiting.data["why"]
        assert f"perdure task compact {handle.id}" in waiting.data["why"]
        assert any(line.startswith("parked until its state is compacted: the state of agent") for line in log)
        before = await settled(app, handle)
        await handle.send("are you there?")
        await until_parked(app, handle, before)
        assert collector.acts == ["s0", "s1", "s2"], "a message costs no call"
        found = await compact(app, handle, "notes")
        assert (found.woken, found.before["context"] > 15_000, found.after["context"]) == (True, True, 2)
        assert (await bounded(handle.result()))["first"] == 5000
    assert collector.acts == ["s0", "s1", "s2", "s2", "s3"]
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert past.state["waiting_for"] is None
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


class Reader(Agent[Bag]):
    """An agent that reads more than the result of its second step, of a step within it, or of all, may have."""

    acts: ClassVar[list[str]] = []
    where: ClassVar[str] = ""

    async def plan(self, ctx: Context, state: Bag) -> list[PlanStep]:
        return [PlanStep(key=f"s{n}", title=f"step {n}") for n in range(2)]

    async def act(self, ctx: Context, state: Bag, step: PlanStep) -> Any:
        self.acts.append(step.key)
        if step.key == "s1" and self.where == "inner step":
            await ctx.step("read", lambda: "x" * 200_000)
        return "x" * 200_000 if step.key == "s1" and self.where == "plan step" else step.key

    async def finish(self, ctx: Context, state: Bag) -> str:
        self.acts.append("finish")
        return "x" * 200_000 if self.where == "result" else "short"


@pytest.mark.parametrize(
    ("where", "acts"),
    [("inner step", ["s0", "s1"]), ("plan step", ["s0", "s1"]), ("result", ["s0", "s1", "finish"])],
)
async def test_a_result_over_its_limit_parks_the_agent_until_the_limit_is_raised(
    app: App, settings: Settings, where: str, acts: list[str]
) -> None:
    class Fresh(Reader):
        acts: ClassVar[list[str]] = []

    Fresh.where = where
    limits = {"payload_limit": 20_000, "large_limit": 100_000, "lease": 30.0}
    handle = await app.agent(name="read")(Fresh).enqueue("all")
    async with App("limited", settings=settings.model_copy(update=limits)) as limited:
        limited.agent(name="read")(Fresh)
        async with running_worker(limited):
            await until_parked(limited, handle)
            before = await settled(limited, handle)
            await handle.send("are you there?")
            await until_parked(limited, handle, before)
        name = "large_limit" if where == "inner step" else "payload_limit"
        (waiting,) = [event for event in await history(handle) if event.type == "waiting"]
        assert waiting.data["why"].endswith(
            f"raise PERDURE_{name.upper()} of the workers; then run: perdure task compact {handle.id}"
        )
        assert Fresh.acts == acts, "a message costs no call"
        assert (await handle.record()).attempts == 0
    raised = limits | {name: 1_000_000}
    async with App("limited", settings=settings.model_copy(update=raised)) as larger:
        larger.agent(name="read")(Fresh)
        async with running_worker(larger):
            await compact(larger, handle)
            assert len(await bounded(handle.result())) == (200_000 if where == "result" else 5)
    assert Fresh.acts == [*acts, *([] if where == "result" else ["s1"]), "finish"]


async def test_a_higher_limit_lets_a_parked_agent_resume(
    app: App, collector: type[Collector], settings: Settings
) -> None:
    handle = await app.agent(name="collect")(collector).enqueue("all", sizes=FULL)
    async with running_worker(app):
        await until_parked(app, handle)
    async with App("limited", settings=settings.model_copy(update={"payload_limit": 100_000})) as larger:
        larger.agent(name="collect")(collector)
        async with running_worker(larger):
            await handle.send("the limit was raised")
            assert (await bounded(handle.result()))["first"] == 5000
    stored = await redis_command(app, "HGET", handle.partition.steps(handle.id), "s:#too_large")
    assert stored is None
    assert collector.acts == ["s0", "s1", "s2", "s2", "s3"]


async def test_a_dead_letter_can_be_compacted_and_replayed(app: App, collector: type[Collector]) -> None:
    class Failing(collector):  # type: ignore[misc, valid-type]  # a class that a fixture returns
        async def act(self, ctx: Context, state: Bag, step: PlanStep) -> str:
            if step.key == "s3" and len(self.acts) == 3:
                self.acts.append("failed")
                raise ConnectionError("cut off")
            return str(await super().act(ctx, state, step))

    handle = await app.agent(name="collect", retry=Retry(max_attempts=1))(Failing).enqueue("all", sizes=[4000] * 4)
    await work_off(app)
    found = await compact(app, handle)
    assert (found.steps, found.state, found.woken) == (2, State.DEAD, False)
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert (await bounded(handle.result()))["archived"] == 2
    assert collector.acts == ["s0", "s1", "s2", "failed", "s3"]
    with pytest.raises(StateError, match="got succeeded"):
        await compact(app, handle)


async def test_what_cannot_be_compacted_is_refused_and_left_as_it_was(app: App, collector: type[Collector]) -> None:
    agent = app.agent(name="collect")(collector)
    handle = await agent.enqueue("all", sizes=FULL)
    with pytest.raises(StateError, match="got queued"):
        await compact(app, handle)
    async with running_worker(app):
        await until_parked(app, handle)
    before = await history(handle)
    with pytest.raises(KeyError, match="unknown"):
        await compact(app, handle, "unknown")
    assert await history(handle) == before


async def test_inputs_that_are_too_large_park_the_agent_before_its_start(
    app: App, settings: Settings, collector: type[Collector], log: list[str]
) -> None:
    handle = await app.agent(name="collect")(collector).enqueue("all", sizes=[10], own="x" * 19_800)
    async with running_worker(app):
        await until_parked(app, handle)
        record = await handle.record()
        assert (record.waits, record.attempts, record.crashes) == ("compaction", 0, 0)
        (waiting,) = [event for event in await history(handle) if event.type == "waiting"]
        for part in ("goal and the inputs", "own (19,8", "PERDURE_PAYLOAD_LIMIT", f"perdure task compact {handle.id}"):
            assert part in waiting.data["why"]
        assert f"perdure task cancel {handle.id}" in waiting.data["why"]
        assert any(line.startswith("parked until its state is compacted: the goal and the inputs") for line in log)
        before = await settled(app, handle)
        await handle.send("are you there?")
        await until_parked(app, handle, before)
        assert [event.type for event in await history(handle)].count("waiting") == 1, "a message logs nothing"
        before = await settled(app, handle)
        found = await compact(app, handle)
        assert (found.woken, found.steps, found.messages) == (True, 0, 0)
        await until_parked(app, handle, before)  # the limit is still the same
    larger = settings.model_copy(update={"payload_limit": 40_000, "check_state": True, "lease": 30.0})
    async with App("limited", settings=larger) as other:
        other.agent(name="collect")(collector)
        async with running_worker(other):
            assert (await compact(app, handle)).woken
            assert (await bounded(handle.result()))["first"] == 10
    assert collector.acts == ["s0"]
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert (past.state["waiting_for"], past.state["own"]) == (None, "x" * 19_800)
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None
