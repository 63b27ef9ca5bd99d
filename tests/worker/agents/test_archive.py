"""Agents that live long: what leaves the state stays reachable, runs once, and survives a restart."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, TaskHandle
from perdure.deadletter.replay import Replay, replay
from perdure.queues.transport.scripts import pairs
from perdure.worker.agents.journal.archive import read_archived_step
from perdure.worker.agents.journal.forks import fork
from perdure.worker.agents.journal.history import check_state, state_at
from perdure.worker.errors import BadHistory, TaskDefinitionError
from pydantic import Field

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, history, letter, redis_command, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("long", check_state=True, lease=30.0)]

AGAIN = Retry(max_attempts=5, base=0.0)


class Pages(AgentState):
    last: int = 12
    recalled: dict[str, Any] = Field(default_factory=dict)


class Walker(Agent[Pages]):
    """An agent that reads numbered pages, and lists all pages at each replan, those that it has read included."""

    keep_steps: ClassVar[int | None] = 3
    acts: ClassVar[list[str]] = []
    fails: ClassVar[set[str]] = set()

    def pages(self, state: Pages) -> list[PlanStep]:
        return [PlanStep(key=f"p{n}", title=f"read page {n}") for n in range(state.last)]

    async def plan(self, ctx: Context, state: Pages) -> list[PlanStep]:
        return self.pages(state)[:2]

    async def replan(self, ctx: Context, state: Pages) -> list[PlanStep] | None:
        return None if any(step.error for step in state.plan) else self.pages(state)

    async def act(self, ctx: Context, state: Pages, step: PlanStep) -> dict[str, str]:
        self.acts.append(step.key)
        await ctx.add_message("assistant", f"reading {step.key}")
        if step.key in self.fails:
            self.fails.discard(step.key)
            raise ConnectionError("cut off")
        if step.key == "p9":
            found = await ctx.recall_step("p0")
            assert found is not None and found.archived
            state.recalled = {"key": found.key, "title": found.title, "result": found.result, "status": found.status}
        return {"text": f"text of {step.key}"}

    async def finish(self, ctx: Context, state: Pages) -> dict[str, Any]:
        missing, live = await ctx.recall_step("p99"), await ctx.recall_step("p11")
        assert missing is None and live is not None and not live.archived
        return {"recalled": state.recalled, "results": sorted(state.results), "archived": state.archive.steps}


@pytest.fixture
def walker() -> type[Walker]:
    class Fresh(Walker):
        acts: ClassVar[list[str]] = []
        fails: ClassVar[set[str]] = set()

    return Fresh


async def fields_of(app: App, handle: TaskHandle[Any]) -> dict[str, bytes]:
    found = pairs(await redis_command(app, "HGETALL", handle.partition.steps(handle.id)))
    return {name.decode(): value for name, value in found.items()}


async def test_steps_that_left_the_state_are_recalled_and_never_run_again(app: App, walker: type[Walker]) -> None:
    walker.fails.add("p7")  # a new attempt restores the state, without the archived steps
    handle = await app.agent(name="walk", retry=AGAIN)(walker).enqueue("read")
    await work_off(app)
    result = await bounded(handle.result())
    assert result["recalled"] == {
        "key": "p0",
        "title": "read page 0",
        "result": {"text": "text of p0"},
        "status": "done",
    }
    assert (result["results"], result["archived"]) == (sorted(f"p{n}" for n in range(12)), 9)
    assert walker.acts == [*(f"p{n}" for n in range(8)), *(f"p{n}" for n in range(7, 12))]
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None
    assert len([name for name in await fields_of(app, handle) if name.startswith("c:#step:")]) == 9
    archived = [event for event in await history(handle) if event.type == "archived"]
    assert [key for event in archived for key in event.data["steps"]] == [f"p{n}" for n in range(9)]


async def test_old_messages_leave_the_state_and_stay_in_the_log(app: App, walker: type[Walker]) -> None:
    walker.keep_messages = 4
    handle = await app.agent(name="walk")(walker).enqueue("read")
    await work_off(app)
    await bounded(handle.result())
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert len(past.state["messages"]) == 4
    assert past.state["archive"]["messages"] == 8
    assert len([event for event in await history(handle) if event.type == "message_added"]) == 12


async def test_a_state_without_an_archive_is_archived_when_it_is_restored(app: App, walker: type[Walker]) -> None:
    """A version without an archive left all of its steps in the plan."""
    walker.keep_steps = None
    walker.fails.add("p8")
    handle = await app.agent(name="walk", retry=Retry(max_attempts=1))(walker).enqueue("read")
    await work_off(app)
    assert (await state_at(app.producer.gateway, handle.partition, handle.id)).state["archive"]["steps"] == 0
    walker.keep_steps = 3
    await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert (await bounded(handle.result()))["archived"] == 9
    first = next(event for event in await history(handle) if event.type == "archived")
    assert first.data["steps"] == [f"p{n}" for n in range(5)]
    assert len(walker.acts) == 13


async def test_a_fork_can_recall_what_its_source_had_archived_by_then(app: App, walker: type[Walker]) -> None:
    handle = await app.agent(name="walk")(walker).enqueue("read")
    await work_off(app)
    await bounded(handle.result())
    forked = await fork(app.producer, handle.id, at="p6")
    names = sorted(name for name in await fields_of(app, forked.handle) if name.startswith("c:"))
    assert names == [f"c:#step:p{n}" for n in range(3)]
    gateway = app.producer.gateway
    found = await read_archived_step(gateway, forked.handle.partition, forked.handle.id, "p2")
    assert found is not None and found["result"] == {"text": "text of p2"}
    walker.acts.clear()
    await work_off(app)
    assert (await bounded(forked.handle.result()))["archived"] == 9
    assert walker.acts == [f"p{n}" for n in range(7, 12)]


@pytest.mark.parametrize("lost", ["the plan after the step", "the start of the next step"])
async def test_steps_that_were_archived_after_a_gap_in_the_log_run_again(
    app: App, walker: type[Walker], lost: str
) -> None:
    """Their records are of a future that did not happen: they hide no step, and are not recalled."""

    class Next(walker):  # type: ignore[misc, valid-type]  # a class that a fixture returns
        snapshot_every: ClassVar[int] = 1000
        early: ClassVar[list[Any]] = []

        async def replan(self, ctx: Context, state: Pages) -> list[PlanStep] | None:
            done = state.archive.steps + len([step for step in state.plan if step.status == "done"])
            self.early.append(await ctx.recall_step("p8"))
            return self.pages(state)[done : done + 1] or None if not state.plan[-1].error else None

    Next.fails.add("p11")
    handle = await app.agent(name="walk", retry=Retry(max_attempts=1))(Next).enqueue("read")
    await work_off(app)
    found = await letter(app, handle)
    first = next(event.number for event in await history(handle) if event.type == "archived")
    gap = (first or 0) + (1 if lost == "the plan after the step" else 2)
    (entry,) = [event.id for event in await history(handle) if event.number == gap]
    await redis_command(app, "XDEL", handle.partition.log(handle.id), entry)
    Next.acts.clear()
    Next.early.clear()
    await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    assert (await bounded(handle.result()))["archived"] == 9
    assert Next.acts == [f"p{n}" for n in range(4, 12)]
    assert Next.early[:4] == [None] * 4
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


async def test_the_log_and_the_results_of_its_steps_are_bounded(app: App, walker: type[Walker]) -> None:
    """Steps whose records were dropped are known as such: a plan that lists them does not run them again."""

    class Long(walker):  # type: ignore[misc, valid-type]  # a class that a fixture returns
        keep_events: ClassVar[int | None] = 40
        snapshot_every: ClassVar[int] = 5

        async def finish(self, ctx: Context, state: Pages) -> dict[str, Any]:
            old, young = await ctx.recall_step("p1"), await ctx.recall_step(f"p{state.archive.steps - 1}")
            assert old is not None and young is not None
            return {"old": (old.status, old.retired, old.result), "young": (young.retired, young.result)}

    Long.fails |= {"p30", "p50"}  # a new attempt restores the state
    handle = await app.agent(name="walk", retry=AGAIN)(Long).enqueue("read", last=60)
    await work_off(app)
    assert await bounded(handle.result()) == {
        "old": ["done", True, None],
        "young": [False, {"text": "text of p56"}],
    }
    assert Long.acts == [
        *(f"p{n}" for n in range(31)),
        *(f"p{n}" for n in range(30, 51)),
        *(f"p{n}" for n in range(50, 60)),
    ]
    events = await history(handle)
    assert (events[0].type, 40 <= len(events) <= 95) == ("log_base", True)
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    records = [name for name in await fields_of(app, handle) if name.startswith("c:#step:")]
    assert len(records) == past.state["archive"]["steps"] - past.state["archive"]["retired"] < 25
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None
    with pytest.raises(BadHistory, match=f"event 3 of task {handle.id} was retired: its log starts with event"):
        await state_at(app.producer.gateway, handle.partition, handle.id, 3)
    forked = await fork(app.producer, handle.id, at="p55")
    Long.acts.clear()
    await work_off(app)
    assert (await bounded(forked.handle.result()))["old"] == ["done", True, None]
    assert Long.acts == [f"p{n}" for n in range(56, 60)]


async def test_an_agent_whose_log_starts_late_resumes_from_before_a_gap(app: App, walker: type[Walker]) -> None:
    class Long(walker):  # type: ignore[misc, valid-type]  # a class that a fixture returns
        keep_events: ClassVar[int | None] = 40
        snapshot_every: ClassVar[int] = 1000

        async def finish(self, ctx: Context, state: Pages) -> dict[str, Any]:
            return {"archived": state.archive.steps}

    Long.fails.add("p50")
    handle = await app.agent(name="walk", retry=Retry(max_attempts=1))(Long).enqueue("read", last=60)
    await work_off(app)
    found = await letter(app, handle)
    gap = [event for event in await history(handle) if event.number is not None][-5]
    await redis_command(app, "XDEL", handle.partition.log(handle.id), gap.id)
    await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    assert (await bounded(handle.result()))["archived"] == 57
    assert sorted(set(Long.acts), key=lambda key: int(key[1:])) == [f"p{n}" for n in range(60)]
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None


async def test_a_successor_recalls_the_steps_of_the_tasks_before_it(app: App) -> None:
    """Both those that had left the state of its predecessor, and those that were in it."""

    class Relay(Agent[Pages]):
        keep_steps: ClassVar[int | None] = 1

        async def plan(self, ctx: Context, state: Pages) -> list[PlanStep]:
            return [PlanStep(key=f"{state.goal}{n}", title=f"read {n}") for n in range(3)]

        async def act(self, ctx: Context, state: Pages, step: PlanStep) -> str:
            return f"text of {step.key}"

        async def finish(self, ctx: Context, state: Pages) -> list[Any]:
            if state.goal != "c":
                following = {"a": "b", "b": "c"}[state.goal]
                await ctx.continue_as(queue=app.name, why="next", arguments={"goal": following, "last": 1})
            found = [await ctx.recall_step(key) for key in ("a0", "a2", "b1", "b2", "c0", "d0")]
            return [None if one is None else one.result for one in found]

    handle = await app.agent(name="relay")(Relay).enqueue("a")
    await work_off(app)
    assert await bounded(handle.result()) == [*(f"text of {key}" for key in ("a0", "a2", "b1", "b2", "c0")), None]


async def test_records_of_archived_steps_are_encrypted(settings: Settings, walker: type[Walker]) -> None:
    async with App("long", settings=with_keys(settings, FIRST)) as app:
        handle = await app.agent(name="walk")(walker).enqueue("read")
        await work_off(app)
        await bounded(handle.result())
        stored = (await fields_of(app, handle))["c:#step:p0"]
        assert b"text of" not in stored
        found = await read_archived_step(app.producer.gateway, handle.partition, handle.id, "p0")
        assert found is not None and found["result"] == {"text": "text of p0"}


async def test_a_policy_must_keep_something(app: App) -> None:
    class Nothing(Walker):
        keep_steps: ClassVar[int | None] = 0

    with pytest.raises(TaskDefinitionError, match="keep_messages and keep_events must be 1 or more, or None"):
        app.agent(name="nothing")(Nothing)


class Summing(Agent[Pages]):
    """Numbers of pages, summed up in `finish`; the steps whose numbers are in `fails` fail once, as does `finish`."""

    keep_steps: ClassVar[int | None] = 10
    fails: ClassVar[set[int]]
    seen: ClassVar[list[list[str]]]

    async def plan(self, ctx: Context, state: Pages) -> list[PlanStep]:
        return [PlanStep(key=f"p{n}", title=f"read page {n}") for n in range(state.last)]

    async def act(self, ctx: Context, state: Pages, step: PlanStep) -> dict[str, int] | None:
        number = int(step.key[1:])
        if number in self.fails:
            self.fails.discard(number)
            raise ConnectionError("cut off")
        return {"number": number}

    async def finish(self, ctx: Context, state: Pages) -> int:
        self.seen.append(list(state.results))
        await ctx.discover(f"{len(state.results)} results")
        state.recalled = state.results["p0"]
        if -1 in self.fails:
            self.fails.discard(-1)
            raise ConnectionError("cut off")
        return sum(result["number"] for result in state.results.values())


@pytest.mark.parametrize("few_events", [False, True])
async def test_finish_has_the_results_of_all_steps(app: App, few_events: bool) -> None:
    """In the order of the plan, also after a resume; the state that is stored stays as small as it was."""

    class Fresh(Summing):
        fails: ClassVar[set[int]] = {57, -1}
        seen: ClassVar[list[list[str]]] = []

    if few_events:
        Fresh.keep_events = 40
    handle = await app.agent(name="sum", retry=AGAIN)(Fresh).enqueue("sum up", last=130)
    await work_off(app)
    assert await bounded(handle.result()) == sum(range(130))
    assert Fresh.seen == [[f"p{n}" for n in range(130)]] * 2
    past = await state_at(app.producer.gateway, handle.partition, handle.id)
    assert (past.state["recalled"], len(past.state["results"]) <= 12) == ({"number": 0}, True)
    assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None
