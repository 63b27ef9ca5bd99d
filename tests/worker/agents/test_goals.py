"""Goals of agents: one task each, until `fresh=True` restarts it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Ephemeral,
    InvalidArguments,
    PlanStep,
    Producer,
    Retry,
    State,
    TaskFailed,
)
from perdure.queues import Gateway, StillRunning, set_partitions
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.transport.scripts import queue_script
from perdure.worker.agent_task import AgentTask
from perdure.worker.errors import TaskDefinitionError
from pydantic import Field, SecretStr, model_validator

from tests.support.lossy_proxy import lossy_gateway
from tests.support.workers import BOUND, bounded, history, letter, redis_command, running_worker, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(lease=30.0)]


class Errand(AgentState):
    where: str
    token: Annotated[SecretStr | None, Ephemeral] = None
    amounts: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def check(self) -> Errand:
        if self.where == "nowhere":
            raise ValueError("nowhere is no place")
        return self


class Runner(Agent[Errand]):
    runs: ClassVar[list[str]] = []
    gate: ClassVar[asyncio.Event | None] = None
    began: ClassVar[asyncio.Event] = asyncio.Event()

    async def plan(self, ctx: Context, state: Errand) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: Errand, step: PlanStep) -> None: ...

    async def finish(self, ctx: Context, state: Errand) -> str:
        self.runs.append(state.goal)
        self.began.set()
        if self.gate is not None:
            await self.gate.wait()
        if state.goal == "fail":
            raise ValueError("it cannot be done")
        return f"{state.goal}: run {len(self.runs)}"


@pytest.fixture
def run(app: App) -> AgentTask[Any]:
    class Fresh(Runner):
        runs: ClassVar[list[str]] = []

    return app.agent(name="run", retry=Retry(max_attempts=1))(Fresh)


async def test_an_equal_goal_returns_the_existing_result(app: App, run: AgentTask[Any]) -> None:
    first = await run.enqueue("fetch", where="shop")
    await work_off(app)
    again = await run.enqueue("fetch", where="shop")
    assert again.id == first.id
    assert await again.result(timeout=0) == "fetch: run 1"
    other = await run.enqueue("fetch", where="market")
    assert other.id != first.id
    await other.cancel()


def test_goal_ids_do_not_depend_on_argument_order(run: AgentTask[Any]) -> None:
    first = run.task_id("fetch", where="shop", amounts={"milk": 1, "eggs": 6})
    assert run.task_id("fetch", amounts={"eggs": 6, "milk": 1}, where="shop") == first
    assert run.task_id("fetch", amounts={"eggs": 6, "milk": 2}, where="shop") != first


async def test_a_key_identifies_the_goal(app: App, run: AgentTask[Any]) -> None:
    first = await run.enqueue("fetch", key="today", where="shop")
    await work_off(app)
    again = await run.enqueue("fetch something else", key="today", where="market")
    assert await again.result(timeout=0) == "fetch: run 1"
    assert again.id == first.id


async def test_goal_ids_do_not_depend_on_secrets(app: App, run: AgentTask[Any]) -> None:
    first = await run.enqueue("fetch", where="shop", token="hunter22")
    assert (await run.enqueue("fetch", where="shop", token="hunter23")).id == first.id
    await first.cancel()


async def test_fresh_restarts_a_finished_goal(app: App, run: AgentTask[Any]) -> None:
    first = await run.enqueue("fetch", where="shop")
    await work_off(app)
    again = await run.enqueue("fetch", where="shop", fresh=True)
    assert (again.id, await again.status()) == (first.id, State.QUEUED)
    assert await history(again) == []
    assert await redis_command(app, "EXISTS", again.partition.steps(again.id)) == 0
    assert await redis_command(app, "TTL", again.partition.record(again.id)) == -1
    await work_off(app)
    assert await bounded(first.result()) == "fetch: run 2"


async def test_fresh_restarts_a_dead_goal_and_removes_its_letter(app: App, run: AgentTask[Any]) -> None:
    handle = await run.enqueue("fail", where="shop")
    await work_off(app)
    await letter(app, handle)
    with pytest.raises(TaskFailed):
        await (await run.enqueue("fail", where="shop")).result(timeout=0)
    again = await run.enqueue("fail", where="shop", fresh=True)
    assert await redis_command(app, "XLEN", again.partition.dead) == 0
    assert await again.cancel() is State.CANCELLED
    assert await (await run.enqueue("fail", where="shop", fresh=True)).status() is State.QUEUED
    await again.cancel()


async def test_fresh_enqueues_a_new_goal(app: App, run: AgentTask[Any]) -> None:
    handle = await run.enqueue("fetch", where="shop", fresh=True)
    await work_off(app)
    assert await bounded(handle.result()) == "fetch: run 1"


async def test_fresh_refuses_a_goal_that_has_not_ended(app: App, run: AgentTask[Any]) -> None:
    handle = await run.enqueue("fetch", where="shop")
    with pytest.raises(StillRunning, match=f"task {handle.id} is queued .* wait for it, or cancel it"):
        await run.enqueue("fetch", where="shop", fresh=True)
    Runner.gate = asyncio.Event()
    Runner.began.clear()
    try:
        async with running_worker(app):
            await bounded(Runner.began.wait())
            with pytest.raises(StillRunning):
                await run.enqueue("fetch", where="shop", fresh=True)
            Runner.gate.set()
            assert await bounded(handle.result()) == "fetch: run 1"
    finally:
        Runner.gate = None


async def test_invalid_inputs_are_refused_before_anything_is_sent(app: App, run: AgentTask[Any]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "missing a required .*argument: 'where'"),  # 3.12 adds "keyword-only"
        ({"where": "nowhere"}, "is no place"),
        ({"where": "shop", "key": ""}, "key must not be empty"),
    ]
    for inputs, problem in cases:
        with pytest.raises(InvalidArguments, match=problem):
            await run.enqueue("fetch", **inputs)
    assert not await redis_command(app, "KEYS", f"*{app.settings.namespace}*task*")


async def test_fresh_restarts_once_if_the_reply_is_lost(gateway: Gateway, producer: Producer) -> None:
    message = EnvelopeTemplate("t").message(b"{}", task_id="goal")
    await producer.enqueue("t", task_id="goal", queue="default")
    with pytest.raises(StillRunning):
        await producer.enqueue_fresh(message, queue="default")
    partition = producer.namespace.partition("default")
    await gateway.command("HSET", partition.record("goal"), "state", "succeeded")
    if gateway.address.url.startswith("unix"):
        async with lossy_gateway(gateway) as (lossy, line):
            line.lose(queue_script("reset_task").sha.encode())
            async with Producer(namespace=producer.namespace.name, gateway=lossy) as other:
                await other.enqueue_fresh(message, queue="default")
            assert line.lost == 1
    else:
        await producer.enqueue_fresh(message, queue="default")
    assert await gateway.command("XLEN", partition.ready) == 2  # that of the first, which was not really worked off


@pytest.mark.parametrize("known", [False, True])
async def test_fresh_moves_a_goal_from_a_closed_partition(app: App, run: AgentTask[Any], known: bool) -> None:
    """`known` is whether the producer has the new route."""
    first = await run.enqueue("fetch", where="shop")
    await work_off(app)
    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, 3)
    if known:
        await (await run.enqueue("fetch", where="market")).cancel()
    again = await run.enqueue("fetch", where="shop", fresh=True)
    assert again.partition != first.partition
    assert await redis_command(app, "EXISTS", first.partition.record(first.id)) == 0
    await work_off(app)
    assert await again.result(timeout=BOUND) == "fetch: run 2"
    assert (await run.enqueue("fetch", where="shop")).partition == again.partition


# agent classes


class Bare(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None: ...

    async def finish(self, ctx: Context, state: AgentState) -> None: ...


class Secretive(AgentState):
    password: SecretStr = SecretStr("")


class Homeless(AgentState):
    client: Annotated[object, Ephemeral]


class Keyed(AgentState):
    key: str = ""


def without(method: str) -> type[Agent[Any]]:
    return type("Partial", (Bare,), {method: getattr(Agent, method)})


def with_state(state: type[AgentState]) -> type[Agent[Any]]:
    return type("Stated", (Bare,), {"state_type": state})


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (without("plan"), "has no plan; define 'async def plan'"),
        (without("act"), "has no act"),
        (without("finish"), "has no finish"),
        (type("Plain", (Bare,), {"act": lambda self, ctx, state, step: None}), "act must be an 'async def'"),
        (type("Asking", (Bare,), {"__init__": lambda self, model: None}), "without arguments: .*'model'"),
        (type("Eager", (Bare,), {"snapshot_every": 0}), "snapshot_every must be 1 or more"),
        (type("Hasty", (Bare,), {"save_every": 0}), "save_every more than 0"),
        (type("Unsure", (Bare,), {"in_doubt": "guess"}), "in_doubt must be 'retry' or 'fail', got 'guess'"),
        (with_state(Secretive), r"field 'password' .* is a secret and must not be stored"),
        (with_state(Homeless), "field 'client' .* must have a default"),
        (with_state(Keyed), "field 'key' .* rename it"),
        (str, "must be a subclass of Agent"),
    ],
)
def test_an_invalid_agent_class_is_refused_with_the_cause(kind: Any, problem: str) -> None:
    with pytest.raises(TaskDefinitionError, match=problem):
        App("bad").agent(name="bad")(kind)


def test_an_agent_is_named_after_its_class_and_inherits_its_state_type() -> None:
    class Inherited(Bare): ...

    app = App("named")
    assert app.agent(Inherited).name == "inherited"
    assert Inherited.state_type is AgentState
    assert Runner.state_type is Errand
    assert app.tasks["inherited"].result_ttl == 30 * 86_400
