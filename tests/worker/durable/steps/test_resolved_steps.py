"""Steps in doubt about which a person decides: the next run takes the decision, and nothing acts twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    PayloadTooLarge,
    PlanStep,
    Retry,
    Settings,
    State,
    StepResolvedAsFailed,
    SyncContext,
    TaskHandle,
    current_context,
)
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import CannotResolve
from perdure.queues.security.keyring import generate_key
from perdure.worker.agents.journal.history import check_state
from pydantic import BaseModel, SecretStr

from tests.support.workers import (
    bounded,
    history,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("decided", lease=30.0)]

AGAIN = Retry(max_attempts=3, max_crashes=100, base=0.0)
RISKY: dict[str, Any] = {"risky": True, "in_doubt": "fail"}


class Receipt(BaseModel):
    number: int


class Shop:
    """Function of a risky step whose first `cut` calls lose their run, after the effect."""

    def __init__(self, app: App, cut: int = 1) -> None:
        self.app = app
        self.cut = cut
        self.paid: list[str] = []

    async def pay(self, order: str) -> Receipt:
        self.paid.append(order)
        if len(self.paid) <= self.cut:
            await self.cut_off()
        return Receipt(number=len(self.paid))

    async def cut_off(self) -> None:
        """Take the lease from the run that calls this: its later writes are refused."""
        handle = await self.app.producer.find(current_context().task_id)
        assert handle is not None
        await steal(self.app, handle, expired=True)


@pytest.fixture
def shop(app: App) -> Shop:
    return Shop(app)


def function(app: App, shop: Shop, seen: list[str], *, loses: list[str] | None = None) -> Any:
    """A task that pays, and tells what it saw of the payment. loses: not empty if it loses its lease before that."""

    @app.task(name="buy", retry=AGAIN)
    async def buy(ctx: Context) -> str:
        await ctx.step("before", len, "x")
        if loses:
            loses.clear()
            await shop.cut_off()
        try:
            receipt = await ctx.options(**RISKY).step("pay", shop.pay, "order 7")
        except StepResolvedAsFailed as error:
            seen.append(error.text)
            return str(await ctx.step("refund", str.upper, error.text))
        seen.append(f"receipt {receipt.number}")
        return f"receipt {receipt.number}"

    return buy


async def in_doubt(app: App, task: Any, *args: Any) -> TaskHandle[Any]:
    """Return a task that has lost its first run and became a dead letter in the next one."""
    handle: TaskHandle[Any] = await task.enqueue(*args)
    await work_off(app)
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.IN_DOUBT
    return handle


async def replayed(app: App, handle: TaskHandle[Any]) -> None:
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)


async def test_a_resolved_result_is_what_the_step_returns(app: App, shop: Shop) -> None:
    seen: list[str] = []
    handle = await in_doubt(app, function(app, shop, seen))
    assert await handle.resolve_step("pay", result={"number": 41}, by="ada") is State.DEAD
    assert await handle.status() is State.DEAD, "to resolve is not to replay"
    await replayed(app, handle)
    assert await bounded(handle.result()) == "receipt 41"
    assert shop.paid == ["order 7"]
    decided = [event for event in await history(handle) if event.type == "step_resolved"]
    assert [(event.step, event.data) for event in decided] == [
        ("pay", {"step": "pay", "decision": "result", "by": "ada", "result": {"number": 41}})
    ]
    assert {"d:before", "d:pay"} <= (await recorded_steps(app, handle)).keys()
    assert not await handle.doubts()


async def test_a_step_resolved_as_failed_raises_what_the_handler_can_catch(app: App, shop: Shop) -> None:
    seen: list[str] = []
    handle = await in_doubt(app, function(app, shop, seen))
    await handle.resolve_step("pay", failed="card refused")
    await replayed(app, handle)
    assert await bounded(handle.result()) == "CARD REFUSED"
    assert (shop.paid, seen) == (["order 7"], ["card refused"])


async def test_a_step_that_is_to_run_again_is_called_once_more(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))
    await handle.resolve_step("pay", run_again=True)
    await replayed(app, handle)
    assert await bounded(handle.result()) == "receipt 2"
    assert shop.paid == ["order 7"] * 2


async def test_the_synchronous_calls_decide_too(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))

    def decide() -> list[str]:
        found = [doubt.step for doubt in handle.doubts_sync()]
        assert handle.resolve_step_sync("pay", result={"number": 12}, by="ada") is State.DEAD
        return found

    assert await bounded(asyncio.to_thread(decide)) == ["pay"]
    await replayed(app, handle)
    assert await bounded(handle.result()) == "receipt 12"


async def test_another_crash_of_a_step_that_ran_again_is_another_doubt(app: App) -> None:
    shop = Shop(app, cut=2)
    handle = await in_doubt(app, function(app, shop, []))
    await handle.resolve_step("pay", run_again=True)
    await replayed(app, handle)
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.IN_DOUBT
    assert shop.paid == ["order 7"] * 2


async def test_a_later_decision_replaces_the_former_until_a_run_has_read_it(app: App, shop: Shop) -> None:
    seen: list[str] = []
    handle = await in_doubt(app, function(app, shop, seen))
    await handle.resolve_step("pay", run_again=True)
    await handle.resolve_step("pay", failed="no")
    await handle.resolve_step("pay", result={"number": 41})
    await replayed(app, handle)
    assert await bounded(handle.result()) == "receipt 41"
    assert shop.paid == ["order 7"]


async def test_a_failure_that_a_run_has_read_is_final(app: App, shop: Shop) -> None:
    """The handler has continued with it: another decision would give it another past."""
    seen: list[str] = []

    @app.task(name="buy", retry=Retry(max_attempts=1, max_crashes=100), strict_order=True)
    async def buy(ctx: Context) -> str:
        try:
            await ctx.options(**RISKY).step("pay", shop.pay, "order 7")
        except StepResolvedAsFailed as error:
            seen.append(await ctx.step("refund", str, error.text))
            if len(seen) == 1:
                raise ConnectionError from None
        return ", ".join(seen)

    handle = await in_doubt(app, buy)
    await handle.resolve_step("pay", failed="card refused")
    await replayed(app, handle)
    assert (await letter(app, handle)).error.endswith("ConnectionError")
    with pytest.raises(CannotResolve, match="a run has read the decision that it failed"):
        await handle.resolve_step("pay", result={"number": 41})
    await replayed(app, handle)
    assert await bounded(handle.result()) == "card refused, card refused"
    assert shop.paid == ["order 7"]


async def test_a_failure_that_the_handler_does_not_catch_can_be_replaced(app: App, shop: Shop) -> None:
    @app.task(name="buy", retry=AGAIN)
    async def buy(ctx: Context) -> int:
        receipt = await ctx.options(**RISKY).step("pay", shop.pay, "order 7")
        return receipt.number

    handle = await in_doubt(app, buy)
    await handle.resolve_step("pay", failed="card refused")
    await replayed(app, handle)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert (found.error, found.message) == (
        "perdure.worker.errors.StepResolvedAsFailed",
        "step 'pay' was resolved as failed: card refused",
    )
    await handle.resolve_step("pay", run_again=True)
    await replayed(app, handle)
    assert await bounded(handle.result()) == 2


async def test_a_result_that_does_not_fit_can_be_replaced(app: App, shop: Shop) -> None:
    seen: list[str] = []
    handle = await in_doubt(app, function(app, shop, seen))
    await handle.resolve_step("pay", result={"number": "many"})
    await replayed(app, handle)
    found = await letter(app, handle)
    assert found.error.endswith("ResolutionMismatch")
    assert "Receipt is declared: number" in found.message
    assert f"perdure task resolve {handle.id} pay" in found.message
    await handle.resolve_step("pay", result={"number": 8})
    await replayed(app, handle)
    assert await bounded(handle.result()) == "receipt 8"
    assert shop.paid == ["order 7"]


async def test_none_is_a_result(app: App) -> None:
    calls: list[int] = []

    async def ping() -> None:
        calls.append(1)
        await Shop(app).cut_off()

    @app.task(name="buy", retry=AGAIN)
    async def buy(ctx: Context) -> str:
        return repr(await ctx.options(**RISKY).step("ping", ping))

    handle = await in_doubt(app, buy)
    await handle.resolve_step("ping", result=None)
    await replayed(app, handle)
    assert await bounded(handle.result()) == "None"
    assert calls == [1]


@pytest.mark.parametrize("decision", ["result", "failed"])
async def test_a_decision_survives_a_crash_of_the_run_that_has_read_it(app: App, shop: Shop, decision: str) -> None:
    """The run that takes the decision loses its lease before it has stored anything."""
    loses: list[str] = []
    handle = await in_doubt(app, function(app, shop, [], loses=loses))
    given: dict[str, Any] = {"result": {"number": 41}, "failed": "no"}
    await handle.resolve_step("pay", **{decision: given[decision]})
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    loses.append("lease")
    await work_off(app)
    await work_off(app)
    assert await bounded(handle.result()) == ("receipt 41" if decision == "result" else "NO")
    assert loses == []
    assert shop.paid == ["order 7"]


async def test_a_decision_holds_for_the_arguments_that_it_was_made_for(app: App, shop: Shop) -> None:
    order = ["order 7"]

    @app.task(name="buy", retry=AGAIN)
    async def buy(ctx: Context) -> int:
        return (await ctx.options(**RISKY).step("pay", shop.pay, order[0])).number

    handle = await in_doubt(app, buy)
    await handle.resolve_step("pay", result={"number": 41})
    order[0] = "order 8"
    await replayed(app, handle)
    found = await letter(app, handle)
    assert found.error.endswith("StepMismatch")
    assert shop.paid == ["order 7"]


async def test_a_plain_function_reads_the_decision_too(app: App, shop: Shop) -> None:
    @app.task(name="buy", retry=AGAIN)
    def buy(ctx: SyncContext) -> int:
        try:
            return ctx.options(**RISKY).step("pay", shop.pay, "order 7").number
        except StepResolvedAsFailed:
            return 0

    handle = await in_doubt(app, buy)
    await handle.resolve_step("pay", failed="no")
    await replayed(app, handle)
    assert await bounded(handle.result()) == 0


async def test_a_tool_that_was_resolved_is_logged_with_its_result(app: App, shop: Shop) -> None:
    @app.task(name="buy", retry=AGAIN)
    async def buy(ctx: Context) -> int:
        return (await ctx.options(**RISKY).tool("pay", shop.pay, "order 7")).number

    handle = await in_doubt(app, buy)
    await handle.resolve_step("pay", result={"number": 41})
    await replayed(app, handle)
    assert await bounded(handle.result()) == 41
    called = [event.data for event in await history(handle) if event.type == "tool_called"]
    assert [data["result"] for data in called] == [{"number": 41}]


# refusals


async def refused(handle: TaskHandle[Any], step: str, match: str) -> None:
    before = await handle.status(), await history(handle)
    with pytest.raises(CannotResolve, match=match):
        await handle.resolve_step(step, run_again=True)
    assert (await handle.status(), await history(handle)) == before


async def test_a_step_that_is_not_in_doubt_is_refused_with_the_steps_that_are(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))
    await refused(handle, "before", "it is not in doubt; in doubt: 'pay'")
    await refused(handle, "other", "in doubt: 'pay'")
    with pytest.raises(PayloadTooLarge):
        await handle.resolve_step("pay", result="x" * 2_000_000)
    for wrong in ({}, {"result": 1, "run_again": True}, {"failed": ""}, {"result": 1, "failed": "no"}):
        with pytest.raises(ValueError, match="needs exactly one"):
            await handle.resolve_step("pay", **wrong)
    with pytest.raises(TypeError, match="result must be JSON data"):
        await handle.resolve_step("pay", result=object())


async def test_a_running_or_ended_task_is_refused(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))
    await handle.resolve_step("pay", result={"number": 1})
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await take_and_die(app)
    await refused(handle, "pay", "a worker runs the task")
    assert await handle.doubts() == [], "a step that runs has an intent, too"
    await work_off(app)
    assert await bounded(handle.result()) == "receipt 1"


async def test_a_task_that_succeeded_is_refused(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))
    await handle.resolve_step("pay", result={"number": 1})
    await replayed(app, handle)
    await bounded(handle.result())
    await refused(handle, "pay", "the task is succeeded")


async def test_a_queued_task_is_resolved_before_a_worker_takes_it(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, function(app, shop, []))
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    assert await handle.resolve_step("pay", result={"number": 41}) is State.QUEUED
    await work_off(app)
    assert await bounded(handle.result()) == "receipt 41"


async def is_scheduled(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.SCHEDULED


async def test_a_scheduled_task_is_resolved(app: App, shop: Shop) -> None:
    """Its second attempt is in an hour: the first has failed beside the doubt."""

    @app.task(name="buy", retry=Retry(max_attempts=3, base=3600.0, cap=3600.0, jitter=0.0, max_crashes=100))
    async def buy(ctx: Context) -> int:
        if ctx.crashes:
            raise ConnectionError
        return (await ctx.options(**RISKY).step("pay", shop.pay, "order 7")).number

    handle = await buy.enqueue()
    async with running_worker(app):
        await wait_until(lambda: is_scheduled(handle), "the second attempt is scheduled")
    assert await handle.resolve_step("pay", failed="no") is State.SCHEDULED
    assert await handle.status() is State.SCHEDULED, "a decision wakes no task"


# agents


def buyer(shop: Shop, nested: bool, seen: list[str]) -> type[Agent[AgentState]]:
    class Buyer(Agent[AgentState]):
        in_doubt = "fail"

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="buy", title="buy", risky=not nested, arguments={"order": 7})]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> dict[str, int]:
            if not nested:
                return (await shop.pay("order 7")).model_dump()
            try:
                return (await ctx.options(**RISKY).tool("pay", shop.pay, "order 7")).model_dump()
            except StepResolvedAsFailed as error:
                seen.append(error.text)
                return {"number": 0}

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return state.results["buy"]

    return Buyer


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("decision", ["result", "failed", "run_again"])
async def test_a_step_of_an_agent_is_resolved(app: App, shop: Shop, nested: bool, decision: str) -> None:
    seen: list[str] = []
    agent: Any = app.agent(name="buyer", retry=AGAIN)(buyer(shop, nested, seen))
    handle = await in_doubt(app, agent, "buy it")
    step = "buy/pay" if nested else "buy"
    assert [doubt.step for doubt in await handle.doubts()] == [step]
    assert f"perdure task resolve {handle.id} {step} with" in (await letter(app, handle)).message
    given: dict[str, Any] = {"result": {"number": 41}, "failed": "card refused", "run_again": True}
    await handle.resolve_step(step, **{decision: given[decision]})
    await replayed(app, handle)
    assert shop.paid == ["order 7"] * (2 if decision == "run_again" else 1)
    if decision == "failed" and not nested:
        found = await letter(app, handle)
        assert found.message == "step 'buy' was resolved as failed: card refused"
        await handle.resolve_step(step, result={"number": 5})
        await replayed(app, handle)
    expected = {"result": 41, "failed": 0 if nested else 5, "run_again": 2}[decision]
    assert await bounded(handle.result()) == {"number": expected}
    assert seen == (["card refused"] if decision == "failed" and nested else [])
    assert not [name for name in await recorded_steps(app, handle) if name.startswith("i:")]
    await check_state(app.producer.gateway, handle.partition, handle.id)


async def test_an_agent_plans_again_after_a_step_that_was_resolved_as_failed(app: App, shop: Shop) -> None:
    asked: list[str] = []

    async def replan(self: Any, ctx: Context, state: AgentState) -> list[PlanStep] | None:
        if any(step.error for step in state.plan) and not asked:
            asked.append(str(state.plan[0].error))
            return [PlanStep(key="apologise", title="apologise")]
        return None

    async def finish(self: Any, ctx: Context, state: AgentState) -> list[str]:
        return [f"{step.key} {step.status}" for step in state.plan]

    kind = type("Planner", (buyer(shop, False, []),), {"replan": replan, "finish": finish})
    agent: Any = app.agent(name="buyer", retry=AGAIN)(kind)
    handle = await in_doubt(app, agent, "buy it")
    await handle.resolve_step("buy", failed="card refused")
    shop.cut = 0
    await replayed(app, handle)
    assert "apologise done" in await bounded(handle.result())
    assert asked == ["StepResolvedAsFailed: step 'buy' was resolved as failed: card refused"]
    assert not await handle.doubts()
    await check_state(app.producer.gateway, handle.partition, handle.id)


async def test_a_plan_step_that_ran_again_and_was_cut_off_is_in_doubt_again(app: App) -> None:
    shop = Shop(app, cut=2)
    handle = await in_doubt(app, app.agent(name="buyer", retry=AGAIN)(buyer(shop, False, [])), "buy it")
    await handle.resolve_step("buy", run_again=True)
    await replayed(app, handle)
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.IN_DOUBT
    assert len(shop.paid) == 2


async def test_a_misfit_of_a_plan_step_is_no_failure_of_it(app: App, shop: Shop) -> None:
    handle = await in_doubt(app, app.agent(name="buyer", retry=AGAIN)(buyer(shop, False, [])), "buy it")
    await handle.resolve_step("buy", result={"number": "many"})
    await replayed(app, handle)
    assert (await letter(app, handle)).error.endswith("ResolutionMismatch")
    await handle.resolve_step("buy", result={"number": 3})
    await replayed(app, handle)
    assert await bounded(handle.result()) == {"number": 3}


# at rest


async def test_a_decision_is_encrypted(settings: Settings) -> None:
    keys = settings.model_copy(update={"encryption_keys": SecretStr(generate_key()), "lease": 30.0})
    async with App("decided", settings=keys) as app:
        shop = Shop(app)
        handle = await in_doubt(app, function(app, shop, []))
        await handle.resolve_step("pay", result={"number": 4711})
        stored = await recorded_steps(app, handle)
        raw = await redis_command(app, "XRANGE", handle.partition.log(handle.id), "-", "+")
        assert b"4711" not in stored["i:pay"]
        assert b"4711" not in repr(raw).encode()
        await replayed(app, handle)
        assert await bounded(handle.result()) == "receipt 4711"
