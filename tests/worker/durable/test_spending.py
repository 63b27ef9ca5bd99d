"""What tasks spend of their budgets: charges of steps and of calls, and what follows when a budget is used up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from loguru import logger
from perdure import (
    Agent,
    AgentState,
    App,
    Budget,
    Context,
    PlanStep,
    Retry,
    State,
    SyncContext,
    TaskHandle,
    current_step,
)
from perdure.deadletter.replay import Replay, replay
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse
from perdure.queues.errors import ConfigurationError, Unavailable
from perdure.testing import make_context
from perdure.worker.durable.run import Run
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.errors import StepDefinitionError, TaskDefinitionError

from tests.support.workers import (
    BOUND,
    bounded,
    history,
    letter,
    redis_command,
    running_worker,
    steal,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("shop")]

AT_ONCE = Retry(max_attempts=3, base=0.0)


@pytest.fixture(autouse=True)
def parks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park for waits that are longer than 50 ms, so that tests need not wait for a second."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)


def store_of(app: App) -> BudgetStore:
    return BudgetStore(app.producer.gateway, app.producer.namespace)


async def spent(app: App, ledger: str) -> dict[str, int]:
    """Return what is spent of a budget, without the time."""
    (standing,) = await store_of(app).charge([BudgetUse(ledger, "", {"tokens": 10**9})], "", {})
    return {unit: amount for unit, amount in standing.spent.items() if amount and unit != "seconds"}


async def call(tokens: int) -> int:
    """Call a model."""
    await current_step().spend(tokens=tokens)
    return tokens


async def asked(handle: TaskHandle[Any]) -> str:
    """Wait until the task is parked and asks; return the id of its wait."""

    async def parked() -> bool:
        return bool(await handle.waits()) and await handle.status() is State.WAITING

    await wait_until(parked, "it asks")
    (wait,) = await handle.waits()
    return wait.id


# charges


async def test_a_recorded_step_charges_nothing_again(app: App) -> None:
    @app.task(budget=Budget(tokens=1000), retry=AT_ONCE)
    async def work(ctx: Context) -> int:
        used = await ctx.step("call", call, 100)
        if ctx.attempt == 1:
            raise RuntimeError("later")
        return used

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == 100
    assert await spent(app, handle.id) == {"tokens": 100, "steps": 1}


async def test_each_try_of_a_step_charges(app: App) -> None:
    async def fail_once() -> int:
        await current_step().spend(tokens=10)
        if current_step().attempt == 1:
            raise RuntimeError("again")
        return 1

    @app.task(budget=Budget(tokens=1000))
    async def work(ctx: Context) -> int:
        return await ctx.options(retry=AT_ONCE).step("call", fail_once)

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == 1
    assert await spent(app, handle.id) == {"tokens": 20, "steps": 1}


async def test_a_step_that_is_cut_off_after_its_charge_charges_again(app: App) -> None:
    """Its model call was made twice. Nothing is lost: the charge was confirmed before the record."""
    runs: list[int] = []

    async def call_and_lose() -> int:
        await current_step().spend(tokens=10)
        runs.append(1)
        if len(runs) == 1:
            await steal(app, handle, expired=True)
        return 1

    @app.task(budget=Budget(tokens=1000))
    async def work(ctx: Context) -> int:
        return await ctx.step("call", call_and_lose)

    handle = await work.enqueue()
    async with running_worker(app):
        assert await bounded(handle.result()) == 1
    assert len(runs) == 2
    assert (await handle.record()).attempts == 1, "none has failed"
    assert (await spent(app, handle.id))["tokens"] == 20


async def test_a_charge_whose_reply_is_lost_counts_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    charge = BudgetStore.charge
    lost: list[str] = []

    async def lose_reply(self: BudgetStore, uses: Any, nonce: str, amounts: Any) -> Any:
        found = await charge(self, uses, nonce, amounts)
        if amounts.get("tokens") and not lost:
            lost.append(nonce)
            raise Unavailable("the reply was lost")
        return found

    monkeypatch.setattr(BudgetStore, "charge", lose_reply)

    @app.task(budget=Budget(tokens=1000))
    async def work(ctx: Context) -> None:
        await ctx.step("call", call, 100)

    handle = await work.enqueue()
    await work_off(app)
    assert lost
    assert (await spent(app, handle.id))["tokens"] == 100


async def test_a_charge_whose_call_was_cancelled_counts_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    charge, cancelled = BudgetStore.charge, asyncio.Event()

    async def hang_after(self: BudgetStore, uses: Any, nonce: str, amounts: Any) -> Any:
        found = await charge(self, uses, nonce, amounts)
        if amounts.get("tokens") and not cancelled.is_set():
            cancelled.set()
            await asyncio.Event().wait()
        return found

    monkeypatch.setattr(BudgetStore, "charge", hang_after)

    @app.task(budget=Budget(tokens=1000))
    async def work(ctx: Context) -> None:
        with pytest.raises(TimeoutError):
            await ctx.options(timeout=0.05).step("slow", call, 100)
        await ctx.step("call", call, 1)

    handle = await work.enqueue()
    await work_off(app)
    assert cancelled.is_set()
    assert (await spent(app, handle.id))["tokens"] == 101


async def test_a_charge_outside_of_steps_is_recorded(app: App) -> None:
    @app.task(budget=Budget(tokens=1000), retry=AT_ONCE)
    async def work(ctx: Context) -> int | None:
        left = await ctx.spend(input_tokens=70, output_tokens=30)
        if ctx.attempt < 3:
            raise RuntimeError("later")
        return left.tokens

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == 900
    assert await spent(app, handle.id) == {"tokens": 100}


async def test_children_and_successors_are_charged_to_the_budget_of_their_parent(app: App) -> None:
    @app.task
    async def child(ctx: Context, tokens: int) -> int:
        return await ctx.step("call", call, tokens)

    @app.task
    async def last(ctx: Context) -> int | None:
        await ctx.step("call", call, 1)
        return (await ctx.budget()).tokens

    @app.task(budget=Budget(tokens=1000))
    async def work(ctx: Context) -> int:
        await ctx.gather(child, [10, 20])
        await ctx.join(await ctx.spawn(child, 30))
        await ctx.continue_as(last, arguments={})

    handle = await work.enqueue()
    async with running_worker(app):
        assert await bounded(handle.result()) == 1000 - 61
    assert (await spent(app, handle.id))["tokens"] == 61


async def test_steps_and_the_time_of_runs_are_charged_and_parked_time_is_not(app: App) -> None:
    @app.task(budget=Budget(steps=5, seconds=1000))
    async def work(ctx: Context) -> list[float | None]:
        await ctx.step("slow", asyncio.sleep, 0.05)
        await ctx.sleep(1.5)
        left = await ctx.budget()
        return [left.steps, left.seconds]

    handle = await work.enqueue()
    async with running_worker(app):
        steps, seconds = await bounded(handle.result())
    assert steps == 4
    assert seconds is not None
    assert 0.05 <= 1000 - seconds < 1.5


async def test_a_task_without_a_budget_makes_no_call(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise AssertionError("no budget is asked for")

    monkeypatch.setattr(BudgetStore, "charge", refuse)

    @app.task
    async def work(ctx: Context) -> list[Any]:
        await ctx.step("call", call, 100)
        left = await ctx.spend(tokens=3)
        return [left.tokens, left.used_up, (await ctx.budget()).usd]

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == [None, False, None]


# used up


async def test_a_budget_that_is_used_up_buries_the_task_before_its_next_step(app: App) -> None:
    ran: list[str] = []

    async def note(name: str, tokens: int) -> str:
        ran.append(name)
        left = await current_step().spend(tokens=tokens)
        assert left.tokens == max(0, 100 - tokens)
        return name

    @app.task(budget=Budget(tokens=100, then="bury"), retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        try:
            await ctx.step("first", note, "first", 150)
            await ctx.step("second", note, "second", 1)
        except Exception as error:  # noqa: BLE001 - no handler can go on
            ran.append(repr(error))

    handle = await work.enqueue()
    await work_off(app)
    assert ran == ["first"]
    dead = await letter(app, handle)
    assert dead.reason == "budget"
    assert dead.error == "perdure.worker.errors.BudgetExceeded"
    assert "the budget of the task is used up (150 of 100 tokens)" in dead.message
    assert dead.attempts == 1


@pytest.mark.parametrize(
    ("budget", "used"),
    [(Budget(steps=2, then="bury"), "2 of 2 steps"), (Budget(seconds=0.15, then="bury"), "of 150 ms")],
)
async def test_steps_and_time_are_used_up_by_themselves(app: App, budget: Budget, used: str) -> None:
    ran: list[int] = []

    async def take(number: int) -> None:
        ran.append(number)
        await asyncio.sleep(0.1)

    @app.task(budget=budget)
    async def work(ctx: Context) -> None:
        for number in range(3):
            await ctx.step("take", take, number)

    handle = await work.enqueue()
    await work_off(app)
    dead = await letter(app, handle)
    assert dead.reason == "budget"
    assert used in dead.message
    assert ran == [0, 1]


async def test_a_replay_gives_a_task_its_own_budget_again(app: App) -> None:
    ran: list[str] = []

    async def note(name: str) -> str:
        ran.append(name)
        await current_step().spend(tokens=100)
        return name

    @app.task(budget=Budget(tokens=100, then="bury"))
    async def work(ctx: Context) -> str:
        await ctx.step("first", note, "first")
        return await ctx.step("second", note, "second")

    handle = await work.enqueue()
    await work_off(app)
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert await handle.result() == "second"
    assert ran == ["first", "second"]
    ledger = await store_of(app).load(handle.id)
    assert ledger is not None
    assert (ledger.spent["tokens"], ledger.total["tokens"]) == (100, 100)


async def test_a_replay_of_a_child_gives_its_parent_the_budget_again(app: App) -> None:
    @app.task
    async def child(ctx: Context) -> list[int]:
        return [await ctx.step(f"call-{number}", call, 100) for number in range(2)]

    @app.task(budget=Budget(tokens=100, then="bury"))
    async def parent(ctx: Context) -> None:
        spawned.append((await ctx.spawn(child)).id)
        await ctx.sleep(3600)

    spawned: list[str] = []
    handle = await parent.enqueue()
    await work_off(app)
    found = await app.producer.find(spawned[0])
    assert found is not None
    dead = await letter(app, found)
    assert dead.reason == "budget"
    assert await replay(app.producer.gateway, dead, Replay())
    await work_off(app)
    assert await found.result() == [100, 100]
    assert await spent(app, handle.id) == {"tokens": 100, "steps": 1}
    ledger = await store_of(app).load(handle.id)
    assert ledger is not None
    assert (ledger.total["tokens"], ledger.by) == (100, "replay")


async def test_a_replay_leaves_a_shared_budget_as_it_is(app: App) -> None:
    @app.task(budget=[Budget(tokens=100, then="bury"), Budget(name="shared", tokens=100, then="bury")])
    async def work(ctx: Context) -> None:
        for number in range(2):
            await ctx.step(f"call-{number}", call, 50)

    first, second = await work.enqueue(), await work.enqueue()
    await work_off(app, concurrency=1)
    assert await first.status() is State.SUCCEEDED
    for _ in range(2):
        dead = await letter(app, second)
        assert dead.message.startswith("budget shared is used up (100 of 100 tokens)")
        assert await replay(app.producer.gateway, dead, Replay())
        await work_off(app)


async def test_the_ledger_of_a_task_that_has_ended_is_kept_as_long_as_its_result(app: App) -> None:
    @app.task(budget=Budget(tokens=100), result_ttl=500)
    async def work(ctx: Context) -> None:
        await ctx.spend(tokens=1)

    handle = await work.enqueue()
    await work_off(app)
    left = await redis_command(app, "PTTL", app.producer.namespace.ledger(handle.id).ledger)
    assert 0 < left <= 500_000


async def test_a_task_of_a_used_up_budget_does_not_start(app: App) -> None:
    ran: list[str] = []

    @app.task(budget=Budget(name="shared", tokens=100, then="bury"))
    async def work(ctx: Context, name: str) -> None:
        ran.append(name)
        await ctx.step("call", call, 100)

    first = await work.enqueue("first")
    await work_off(app)
    second = await work.enqueue("second")
    await work_off(app)
    assert await first.status() is State.SUCCEEDED
    assert ran == ["first"]
    assert (await letter(app, second)).reason == "budget"


async def test_a_run_that_resumes_returns_what_is_recorded(app: App) -> None:
    """Whether it was interrupted makes no difference: its budget is looked at before the next step only."""

    @app.task(budget=Budget(steps=1, then="bury"), retry=AT_ONCE)
    async def work(ctx: Context) -> int:
        found = await ctx.step("call", call, 1)
        if ctx.attempt == 1:
            raise RuntimeError("later")
        return found

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == 1


async def test_a_person_adds_to_a_used_up_budget(app: App) -> None:
    ran: list[str] = []

    async def note(name: str) -> str:
        ran.append(name)
        await call(100)
        return name

    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> list[Any]:
        names = [await ctx.step(name, note, name) for name in ("first", "second", "third")]
        return [*names, (await ctx.budget()).tokens]

    async with running_worker(app):
        handle = await work.enqueue()
        wait = await asked(handle)
        assert ran == ["first"]
        (shown,) = await handle.waits()
        assert (shown.who, shown.why) == ("operator", "the budget of the task is used up: 100 of 100 tokens")
        await handle.answer("budget", {"tokens": 50}, by="ada")

        async def again() -> bool:
            return [one.id != wait for one in await handle.waits()] == [True]

        await wait_until(again, "it asks again")
        assert ran == ["first", "second"]
        await handle.answer("budget", {"tokens": 200}, by="ada")
        assert await bounded(handle.result()) == ["first", "second", "third", 50]
    assert ran == ["first", "second", "third"]
    types = [event.type for event in await history(handle)]
    assert (types.count("answered"), types.count("orphaned")) == (2, 0)
    assert await handle.waits() == []


async def test_a_person_denies(app: App) -> None:
    @app.task(budget=Budget(tokens=100), retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        await ctx.step("first", call, 100)
        await ctx.step("second", call, 100)

    async with running_worker(app):
        handle = await work.enqueue()
        await asked(handle)
        await handle.answer("budget", "deny", by="ada")
        dead = await letter(app, handle)
    assert (dead.reason, dead.attempts) == ("budget", 1)
    assert "ada refused to raise it" in dead.message
    logged = [(event.type, event.data.get("value")) for event in await history(handle)]
    assert ("answered", "deny") in logged
    assert "left_promises" not in [kind for kind, _ in logged]


async def test_a_void_answer_is_dropped(app: App) -> None:
    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> int:
        await ctx.step("first", call, 100)
        return await ctx.step("second", call, 1)

    async with running_worker(app):
        handle = await work.enqueue()
        await asked(handle)
        await handle.answer("budget", {"tokens": None})

        async def dropped() -> bool:
            return any(event.type == "answer_dropped" for event in await history(handle))

        await wait_until(dropped, "the answer is dropped")
        await handle.answer("budget", {"tokens": 10})
        assert await bounded(handle.result()) == 1


async def test_an_operator_raises_the_budget_in_place_of_an_answer(app: App) -> None:
    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> int:
        await ctx.step("first", call, 100)
        return await ctx.step("second", call, 7)

    async with running_worker(app):
        handle = await work.enqueue()
        await asked(handle)
        await store_of(app).raise_(handle.id, {"tokens": 100}, number=None)
        assert await bounded(handle.result()) == 7
        assert await handle.waits() == []


async def test_a_raise_between_the_look_and_the_park_wakes_the_task(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is not parked yet when the budget is raised, so that raise wakes nothing."""
    park = Run.park
    raised: list[int] = []

    async def raise_first(self: Run, reason: Any, **grace: Any) -> Any:
        if not raised:
            raised.append(await store_of(app).raise_(self.id, {"tokens": 100}))
        await park(self, reason, **grace)

    monkeypatch.setattr(Run, "park", raise_first)

    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> int:
        await ctx.step("first", call, 100)
        return await ctx.step("second", call, 7)

    async with running_worker(app):
        handle = await work.enqueue()
        assert await bounded(handle.result()) == 7
    assert raised == [True]


async def test_one_of_the_tasks_that_share_a_budget_asks(app: App) -> None:
    @app.task(budget=Budget(name="shared", tokens=100))
    async def work(ctx: Context) -> int:
        return await ctx.step("call", call, 60)

    async with running_worker(app):
        await (await work.enqueue()).result(timeout=BOUND)
        await (await work.enqueue()).result(timeout=BOUND)
        handles = [await work.enqueue(), await work.enqueue()]

        async def parked() -> bool:
            return [await handle.status() for handle in handles] == [State.WAITING] * 2

        await wait_until(parked, "both wait")
        waits = [await handle.waits() for handle in handles]
        assert sorted(len(found) for found in waits) == [0, 1]
        asking, other = handles if waits[0] else reversed(handles)
        explained = await other.explain()
        assert "waiting for budget shared:-" in explained.sentence
        assert "(budget shared is used up: 120 of 100 tokens); it asks again" in explained.sentence
        assert explained.remedy is not None
        assert explained.remedy.endswith("perdure budget raise shared:-")
        await asking.answer("budget", {"tokens": 200})
        for handle in handles:
            assert await handle.result(timeout=BOUND) == 60


async def test_the_next_window_ends_the_wait(app: App) -> None:
    @app.task(budget=Budget(name="hourly", tokens=100, per=1.5))
    async def work(ctx: Context) -> int:
        return await ctx.step("call", call, 100)

    async with running_worker(app):
        first, second = await work.enqueue(), await work.enqueue()
        assert await first.result(timeout=BOUND) == 100
        assert await second.result(timeout=BOUND) == 100
        assert await second.waits() == []


async def test_another_task_continues_the_work(app: App) -> None:
    seen: list[Any] = []

    @app.task
    async def cheaper(ctx: Context, name: str) -> str:
        handoff = None if ctx.resumption is None else ctx.resumption.handoff
        seen.append([None if handoff is None else handoff.detail, (await ctx.budget()).tokens])
        await ctx.step("call", call, 30)
        return f"cheaper {name}"

    @app.task(budget=Budget(tokens=100, then="hand_off", to="cheaper"))
    async def work(ctx: Context, name: str) -> str:
        await ctx.step("first", call, 100)
        return str(await ctx.step("second", call, 100))

    handle = await work.enqueue("report")
    async with running_worker(app):
        assert await bounded(handle.result()) == "cheaper report"
    assert seen == [["the budget of the task is used up: 100 of 100 tokens", 100]]
    assert (await spent(app, handle.id))["tokens"] == 100
    assert (await spent(app, f"{handle.id}.h1"))["tokens"] == 30


async def test_concurrent_branches_wait_for_one_answer(app: App) -> None:
    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> list[int]:
        await ctx.step("first", call, 100)
        return list(await asyncio.gather(*(ctx.step(f"branch-{n}", call, n) for n in range(1, 4))))

    async with running_worker(app):
        handle = await work.enqueue()
        await asked(handle)
        await handle.answer("budget", {"tokens": 1000})
        assert await bounded(handle.result()) == [1, 2, 3]


async def test_a_plain_function_charges_too(app: App) -> None:
    @app.task(budget=Budget(tokens=100))
    def work(ctx: SyncContext) -> list[Any]:
        found: int = ctx.step("call", call, 40)
        left = ctx.spend(tokens=50)
        return [found, left.tokens, ctx.budget().tokens]

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == [40, 10, 10]


# notices, prices and bad input


async def test_a_notice_is_given_once_at_80_percent(app: App) -> None:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}", level="WARNING")

    @app.task(budget=Budget(tokens=100, usd=5))
    async def work(ctx: Context) -> list[list[str]]:
        sentences = []
        for name, tokens in (("a", 79), ("b", 1), ("c", 5)):
            await ctx.step(name, call, tokens)
            sentences.append((await ctx.capacity()).sentences())
        return sentences

    handle = await work.enqueue()
    await work_off(app)
    logger.remove(sink)
    text = "80 of 100 tokens"
    assert await handle.result() == [[], [f"Budget used: {text}."], ["Budget used: 85 of 100 tokens."]]
    noticed = [event.data for event in await history(handle) if event.type == "budget_low"]
    assert [(data.get("budget", ""), data["ledger"], data["used"]) for data in noticed] == [("", handle.id, text)]
    assert lines.count(f"most of the budget of the task is used: {text}\n") == 1


async def test_the_price_of_a_model_counts_in_dollars(app: App) -> None:
    seen: list[Any] = []

    async def prices(model: str, usage: Any) -> Decimal | None:
        seen.append((model, *usage))
        return Decimal("0.25") if model == "known" else None

    app.prices = prices

    async def ask_model(model: str) -> float | None:
        return (await current_step().spend(input_tokens=3, output_tokens=4, model=model)).usd

    @app.task(budget=Budget(usd=1))
    async def work(ctx: Context) -> list[Any]:
        left = await ctx.step("known", ask_model, "known")
        with pytest.raises(ConfigurationError, match="no price of model 'unknown'"):
            await ctx.step("unknown", ask_model, "unknown")
        await ctx.spend(usd=0.000_000_001)
        await ctx.spend(usd=0)
        return [left, (await ctx.budget()).usd]

    handle = await work.enqueue()
    await work_off(app)
    assert await handle.result() == [0.75, 0.749_999_999]
    assert seen == [("known", 3, 4), ("unknown", 3, 4)]
    found = await spent(app, handle.id)
    assert (found["tokens"], found["usd"]) == (14, 250_000_001)


async def test_without_prices_a_dollar_budget_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from perdure.worker.durable.prices import Usage, price_of

    monkeypatch.setitem(sys.modules, "genai_prices", None)
    with pytest.raises(ConfigurationError, match=r"pass usd= to ctx.spend, or prices= to the app, or install"):
        await price_of(None, "gpt-5", Usage(1, 2))
    with pytest.raises(ConfigurationError, match="pass input_tokens= and output_tokens="):
        await price_of(None, "gpt-5", Usage())
    for wrong in (float("nan"), -1, True, "1"):
        with pytest.raises(ConfigurationError, match="must return dollars"):
            await price_of(partial(_wrong_price, wrong), "gpt-5", Usage(1, 2))


def _wrong_price(price: Any, *_: object) -> Any:
    return price


async def test_the_prices_of_the_library_count() -> None:
    pytest.importorskip("genai_prices")
    from perdure.worker.durable.prices import Usage, price_of

    price = await price_of(None, "gpt-4o", Usage(1_000_000, 0))
    assert price == await price_of(None, "openai/gpt-4o", Usage(1_000_000, 0)) > 0
    with pytest.raises(ConfigurationError, match="genai-prices does not know model 'no-such-model'"):
        await price_of(None, "no-such-model", Usage(1, 2))


WRONG: Sequence[tuple[dict[str, Any], str]] = [
    ({}, "needs what was spent"),
    ({"model": "gpt-5"}, "needs what was spent"),
    ({"tokens": -1}, "tokens of ctx.spend must be a whole number, 0 or more, got -1"),
    ({"tokens": 1.5}, "must be a whole number"),
    ({"tokens": True}, "must be a whole number"),
    ({"tokens": 2**60}, "must be a whole number"),
    ({"usd": -0.1}, "usd of ctx.spend must be a number of dollars, 0 or more"),
    ({"usd": float("nan")}, "must be a number of dollars"),
    ({"usd": float("inf")}, "must be a number of dollars"),
    ({"usd": True}, "must be a number of dollars"),
    ({"usd": "1"}, "must be a number of dollars"),
    ({"usd": 1e12}, "usd of ctx.spend must be more than 0 and at most"),
    ({"tokens": 1, "input_tokens": 1}, "got both"),
    ({"tokens": 1, "model": ""}, "must be the name of a model"),
]


@pytest.mark.parametrize(("given", "problem"), WRONG)
async def test_wrong_amounts_are_refused(given: dict[str, Any], problem: str) -> None:
    ctx = make_context()
    with pytest.raises(StepDefinitionError, match=problem):
        await ctx.spend(**given)
    left = await ctx.spend(tokens=3, usd=Decimal("0.1"))
    assert (left.tokens, left.usd, left.used_up) == (None, None, False)


# agents, producers without the code, webhooks


class Research(Agent[AgentState]):
    """Calls a model in each step of its plan."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=f"part-{number}", title="a part") for number in range(3)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
        return await ctx.tool("model", call, 40)

    async def finish(self, ctx: Context, state: AgentState) -> list[Any]:
        return [(await ctx.budget()).tokens, *(await ctx.capacity()).sentences()]


async def test_an_agent_asks_before_the_next_call_of_its_tools(app: App) -> None:
    research = app.agent(Research, budget=Budget(tokens=80))
    async with running_worker(app):
        handle = await research.enqueue("whales")
        await asked(handle)
        assert (await spent(app, handle.id))["tokens"] == 80
        await handle.answer("budget", {"tokens": 50})
        assert await bounded(handle.result()) == [10, "Budget used: 120 of 130 tokens."]


async def test_a_task_of_a_producer_without_the_code_has_the_budget_of_its_definition(app: App) -> None:
    @app.task(budget=Budget(name="tenant", by="tenant", tokens=100, then="bury"))
    async def work(ctx: Context, tenant: str) -> int | None:
        return (await ctx.spend(tokens=30)).tokens

    found = []
    for tenant in ("a", "b", "a"):
        handle = await app.producer.enqueue("work", {"tenant": tenant}, queue=app.name)
        await work_off(app)
        found.append(await handle.result())
    assert found == [70, 70, 40]


async def test_a_group_is_charged_to_the_budget_of_its_callback(app: App) -> None:
    @app.task
    async def item(ctx: Context, tokens: int) -> int:
        return await ctx.step("call", call, tokens)

    @app.task(budget=Budget(tokens=100))
    async def report(ctx: Context, results: list[int]) -> list[Any]:
        return [results, (await ctx.budget()).tokens]

    handle = await item.enqueue_group([10, 20, 30], then=report)
    async with running_worker(app):
        assert await bounded(handle.result()) == [[10, 20, 30], 40]


async def test_arguments_without_a_key_are_a_dead_letter(app: App) -> None:
    @app.task(budget=Budget(name="tenant", by=lambda arguments: arguments["tenant"]["id"], tokens=100))
    async def work(ctx: Context, tenant: dict[str, Any]) -> None: ...

    handle = await work.enqueue({})
    await work_off(app)
    dead = await letter(app, handle)
    assert dead.reason == "invalid_arguments"
    assert "key of budget 'tenant'" in dead.message


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ("5", "budget must be a Budget"),
        ([Budget(usd=1), Budget(usd=2)], "each budget once"),
        (Budget(name="tenant", by="customer", usd=1), "'customer' must be an argument"),
    ],
)
async def test_a_wrong_budget_is_refused_where_the_task_is_defined(app: App, budget: Any, problem: str) -> None:
    with pytest.raises(TaskDefinitionError, match=problem):

        @app.task(budget=budget)
        async def work(ctx: Context, tenant: str) -> None: ...


# what reviewers of the first version found


async def test_a_child_does_not_hand_off_for_its_parent(app: App) -> None:
    """It has other arguments than the task that continues. The parent hands off when it learns of the child's end."""

    @app.task
    async def cheaper(ctx: Context, topic: str) -> str:
        return f"cheap {topic}"

    @app.task
    async def fetch(ctx: Context, url: str) -> int:
        await ctx.step("first", call, 90)
        return await ctx.step("second", call, 90)

    @app.task(budget=Budget(tokens=100, then="hand_off", to="cheaper"))
    async def rich(ctx: Context, topic: str) -> Any:
        return await ctx.gather(fetch, ["a", "b"])

    handle = await rich.enqueue("news")
    async with running_worker(app):
        assert await bounded(handle.result()) == "cheap news"


async def test_a_parent_whose_children_have_used_the_budget_up_keeps_their_results(app: App) -> None:
    @app.task
    async def child(ctx: Context, number: int) -> int:
        return await ctx.step("call", call, 90)

    @app.task(budget=Budget(tokens=100, then="bury"))
    async def parent(ctx: Context) -> int:
        return sum(await ctx.gather(child, [1, 2, 3], limit=None))

    @app.task(budget=Budget(tokens=100, then="bury"))
    async def careless(ctx: Context) -> int:
        total = sum(await ctx.gather(child, [1, 2, 3], limit=None))
        return total + await ctx.step("more", call, 1)

    async with running_worker(app):
        first, second = await parent.enqueue(), await careless.enqueue()
        assert await bounded(first.result()) == 270
        await wait_until(partial(ended, second), "its end")
    assert (await letter(app, second)).reason == "budget"


async def ended(handle: TaskHandle[Any]) -> bool:
    return (await handle.status()).terminal


async def test_concurrent_steps_start_up_to_the_limit(app: App) -> None:
    ran: list[int] = []

    async def note(number: int) -> int:
        ran.append(number)
        await asyncio.sleep(0)
        return number

    @app.task(budget=Budget(steps=5, then="bury"))
    async def work(ctx: Context) -> list[int]:
        return list(await asyncio.gather(*(ctx.step(f"branch-{n}", note, n) for n in range(20))))

    handle = await work.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).reason == "budget"
    assert len(ran) == 5


async def test_an_answer_in_a_unit_that_the_budget_does_not_limit_is_dropped(app: App) -> None:
    @app.task(budget=Budget(tokens=100))
    async def work(ctx: Context) -> int:
        return await ctx.step("first", call, 100) + await ctx.step("second", call, 1)

    handle = await work.enqueue()
    async with running_worker(app):
        await handle.answer(await asked(handle), {"usd": 5})
        await wait_until(partial(dropped, handle), "the answer is dropped")
        await handle.answer(await asked(handle), {"tokens": 50})
        assert await bounded(handle.result()) == 101


async def dropped(handle: TaskHandle[Any]) -> bool:
    reasons = [event.data["why"] for event in await history(handle) if event.type == "answer_dropped"]
    return reasons == ["the budget does not limit usd: add tokens, or deny"]


@pytest.mark.parametrize("usd", [Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal(-1), float("nan")])
async def test_what_is_no_amount_of_money_is_refused(app: App, usd: Any) -> None:
    context = make_context()
    with pytest.raises(StepDefinitionError, match=r"usd of ctx\.spend must be a number of dollars"):
        await context.spend(usd=usd)


async def test_a_charge_outside_of_steps_is_the_same_call_when_prices_change(settings: Any) -> None:
    prices = iter([1.0, 7.0])
    priced = App("shop", settings=settings, prices=lambda model, usage: next(prices))

    @priced.task(budget=Budget(usd=100), retry=AT_ONCE)
    async def work(ctx: Context) -> int:
        await asyncio.gather(ctx.spend(model="big", input_tokens=10))  # in a task of its own, it is met by its text
        if ctx.attempt == 1:
            raise RuntimeError("later")
        return 1

    async with priced:
        handle = await work.enqueue()
        await work_off(priced)
        assert await handle.result() == 1
        assert (await spent(priced, handle.id))["usd"] == 1_000_000_000
