"""Steps that a handler forgets: they end with the attempt, in the act that stores its outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import App, Context, Retry, Snooze, SyncContext, TaskFailed, TaskHandle, current_step
from perdure.deadletter.replay import Replay, replay
from perdure.worker.errors import StepDefinitionError

from tests.support.workers import bounded, letter, recorded_steps, steal, work_off

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


async def lose_worker(app: App, handle: TaskHandle[Any]) -> None:
    """Lose the lease, so that the next run continues; the present one is cancelled."""
    await steal(app, handle, expired=True)
    await asyncio.sleep(60)


class Shop:
    """External services: what they were asked to do, and the idempotency keys of the calls."""

    def __init__(self, refusals: int = 1) -> None:
        self.done: list[str] = []
        self.keys: list[str] = []
        self.refusals = refusals

    async def look_up(self) -> str:
        self.done.append("look up")
        return "order"

    async def charge(self, order: str) -> str:
        self.done.append("charge")
        self.keys.append(current_step().idempotency_key.partition(":")[2])
        return f"payment of {order}"

    async def reserve(self, order: str) -> str:
        self.done.append("reserve")
        return f"stock of {order}"

    async def ship(self, payment: str) -> str:
        self.done.append("ship")
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("no van")
        return f"parcel for {payment}"

    async def refund(self, payment: str) -> None:
        self.done.append(f"refund {payment}")

    async def release(self, stock: str) -> None:
        self.done.append(f"release {stock}")


async def test_the_next_attempt_runs_forgotten_steps_again_under_new_keys(app: App) -> None:
    shop = Shop()

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        order = await ctx.step("look up", shop.look_up)
        payment = await ctx.step("charge", shop.charge, order)
        try:
            return await ctx.step("ship", shop.ship, payment)
        except RuntimeError:
            await ctx.step("refund", shop.refund, payment)
            await ctx.forget("charge")
            raise

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of order"
        assert shop.done == ["look up", "charge", "ship", "refund payment of order", "charge", "ship"]
        assert shop.keys == ["charge", "charge:1"]


async def test_a_crash_before_the_end_of_the_attempt_forgets_nothing(app: App) -> None:
    shop, runs = Shop(refusals=0), list[int]()

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        runs.append(1)
        order = await ctx.step("look up", shop.look_up)
        payment = await ctx.step("charge", shop.charge, order)
        if len(runs) == 1:
            await ctx.forget("charge")
            await lose_worker(app, running)
        return payment

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == "payment of order"
        assert shop.done == ["look up", "charge"]


async def test_a_resumed_run_forgets_what_the_lost_one_forgot(app: App) -> None:
    """What was recorded after the call stays, though the resumed run calls it again."""
    shop, runs, done = Shop(refusals=0), list[int](), list[str]()

    async def notify() -> None:
        done.append("notify")

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        runs.append(1)
        payment = await ctx.step("charge", shop.charge, "order")
        if ctx.attempt == 1:
            await ctx.forget("charge")
        await ctx.step("notify", notify)
        if len(runs) == 1:
            await lose_worker(app, running)
        if ctx.attempt == 1:
            raise RuntimeError("no van")
        return payment

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == "payment of order"
        assert (shop.done, done) == (["charge", "charge"], ["notify"])
        assert not [name for name in await recorded_steps(app, running) if "#forget" in name and name[0] == "d"]


async def test_a_dead_letter_has_forgotten_too(app: App) -> None:
    shop = Shop(refusals=9)

    @app.task(retry=Retry(max_attempts=1))
    async def buy(ctx: Context) -> str:
        order = await ctx.step("look up", shop.look_up)
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, order, undo=shop.refund)
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match="no van"):
            await bounded(running.result())
        left = await recorded_steps(app, running)
        assert sorted(name for name in left if name.startswith("d:")) == ["d:look up"]
        assert "s:#forgotten" in left


async def test_a_saga_undoes_its_steps_in_reverse_order(app: App) -> None:
    shop = Shop(refusals=2)

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        order = await ctx.step("look up", shop.look_up)
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, order, undo=shop.refund)
            await saga.step("reserve", shop.reserve, order, undo=shop.release)
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of order"
        undone = ["release stock of order", "refund payment of order"]
        attempt = ["charge", "reserve", "ship"]
        assert shop.done == ["look up", *attempt, *undone, *attempt, *undone, *attempt]
        assert shop.keys == ["charge", "charge:1", "charge:2"]


async def test_sagas_of_one_handler_forget_their_own_steps_only(app: App) -> None:
    shop = Shop(refusals=0)

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> list[str]:
        sent = []
        for order in ("a", "b"):
            async with ctx.saga() as saga:
                payment = await saga.step("charge", shop.charge, order, undo=shop.refund)
                if order == "b" and ctx.attempt == 1:
                    shop.refusals = 1
                sent.append(await saga.step("ship", shop.ship, payment))
        return sent

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == ["parcel for payment of a", "parcel for payment of b"]
        assert shop.done == ["charge", "ship", "charge", "ship", "refund payment of b", "charge", "ship"]
        assert shop.keys == ["charge", "charge#2", "charge#2:1"]


async def test_a_failed_undo_is_called_again_by_the_next_attempt(app: App) -> None:
    shop, refused = Shop(), list[str]()

    async def refund(payment: str) -> None:
        if not refused:
            refused.append(payment)
            raise OSError("bank is closed")
        await shop.refund(payment)

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "order", undo=refund)
            await saga.step("reserve", shop.reserve, "order", undo=shop.release)
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await bounded(running.result())
        assert shop.done.count("release stock of order") == 1
        assert refused == ["payment of order"]


async def test_a_plain_function_has_sagas(app: App) -> None:
    done: list[str] = []

    def charge(order: str) -> str:
        done.append("charge")
        return f"payment of {order}"

    def refund(payment: str) -> None:
        done.append(f"refund {payment}")

    @app.task(retry=AT_ONCE)
    def buy(ctx: SyncContext) -> str:
        with ctx.saga() as saga:
            payment: str = saga.step("charge", charge, "x", undo=refund)
            if ctx.attempt == 1:
                raise RuntimeError("no van")
            return payment

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "payment of x"
        assert done == ["charge", "refund payment of x", "charge"]


async def test_unknown_steps_cannot_be_forgotten(app: App) -> None:
    problems: list[str] = []

    @app.task
    async def buy(ctx: Context) -> None:
        for names in ((), ("nothing",), ("a#b",)):
            try:
                await ctx.forget(*names)
            except StepDefinitionError as error:
                problems.append(str(error))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await bounded(running.result())
        assert [problem[:30] for problem in problems] == [
            "forget needs the names of step",
            "forget: this task has called n",
            "name must be 1 to 200 characte",
        ]


@pytest.mark.parametrize("cut", ["crash", "failed undo"])
async def test_a_saga_that_began_to_undo_does_not_continue(app: App, cut: str) -> None:
    shop, runs = Shop(refusals=0), list[int]()

    async def refund(payment: str) -> None:
        if len(runs) == 1:
            if cut == "crash":
                await lose_worker(app, running)
            raise OSError("bank is closed")
        await shop.refund(payment)

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        runs.append(1)
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "x", undo=refund)
            await saga.step("reserve", shop.reserve, "x", undo=shop.release)
            if len(runs) == 1:
                raise RuntimeError("a failure of no step, which does not happen again")
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of x"
        undone = ["release stock of x", "refund payment of x"]
        assert shop.done == ["charge", "reserve", *undone, "charge", "reserve", "ship"]


async def test_a_request_to_run_later_undoes_nothing(app: App) -> None:
    shop, runs = Shop(refusals=0), list[int]()

    @app.task
    async def buy(ctx: Context) -> str:
        runs.append(1)
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "x", undo=shop.refund)
            if len(runs) == 1:
                raise Snooze(0.0)
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of x"
        assert shop.done == ["charge", "ship"]


async def test_a_step_in_doubt_undoes_nothing(app: App) -> None:
    shop = Shop(refusals=0)

    async def ship(payment: str) -> None:
        await lose_worker(app, running)

    @app.task
    async def buy(ctx: Context) -> None:
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "x", undo=shop.refund)
            await ctx.options(risky=True, in_doubt="fail").step("ship", ship, payment)

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await work_off(app)
        with pytest.raises(TaskFailed, match="in_doubt"):
            await bounded(running.result())
        assert shop.done == ["charge"]


async def test_a_replay_without_failures_undoes_the_rest_before_it_begins_again(app: App) -> None:
    shop, closed = Shop(), [True]

    async def refund(payment: str) -> None:
        if closed:
            raise OSError("bank is closed")
        await shop.refund(payment)

    @app.task(retry=Retry(max_attempts=1))
    async def buy(ctx: Context) -> str:
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "x", undo=refund)
            await saga.step("reserve", shop.reserve, "x", undo=shop.release)
            return str(await saga.step("ship", shop.ship, payment))

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        closed.clear()
        for _ in range(2):
            await replay(app.producer.gateway, await letter(app, running), Replay(rerun_failed=True))
            await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of x"
        attempt = ["charge", "reserve", "ship"]
        assert shop.done == [*attempt, "release stock of x", "refund payment of x", *attempt]


@pytest.mark.parametrize("continues", [True, False])
async def test_a_saga_whose_failure_was_handled_is_history(app: App, *, continues: bool) -> None:
    shop, refused = Shop(), list[str]()

    async def mail() -> None:
        if not refused:
            refused.append("mail")
            raise OSError("no mail")

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        try:
            async with ctx.saga() as saga:
                payment = await saga.step("charge", shop.charge, "a", undo=shop.refund)
                sent = str(await saga.step("ship", shop.ship, payment))
        except RuntimeError as error:
            if not continues:
                raise ValueError("no order") from error
            sent = await ctx.step("charge b", shop.charge, "b")
        await ctx.step("mail", mail)
        return sent

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        first = ["charge", "ship", "refund payment of a", "charge"]
        assert await bounded(running.result()) == ("payment of b" if continues else "parcel for payment of a")
        assert shop.done == (first if continues else [*first, "ship"])


async def test_a_request_to_run_later_after_a_saga_forgets_its_steps(app: App) -> None:
    shop = Shop()

    @app.task(retry=AT_ONCE)
    async def buy(ctx: Context) -> str:
        try:
            async with ctx.saga() as saga:
                payment = await saga.step("charge", shop.charge, "a", undo=shop.refund)
                return str(await saga.step("ship", shop.ship, payment))
        except RuntimeError:
            raise Snooze(0.0)  # noqa: B904 - the request names no cause

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "parcel for payment of a"
        assert shop.done == ["charge", "ship", "refund payment of a", "charge", "ship"]


async def test_the_chunks_of_a_large_result_are_forgotten_by_the_run_that_recorded_them(app: App) -> None:
    async def read() -> str:
        return "x" * 3_000_000

    async def ship() -> None:
        raise RuntimeError("no van")

    @app.task(retry=Retry(max_attempts=1))
    async def buy(ctx: Context) -> None:
        async with ctx.saga() as saga:
            await saga.step("read", read)
            await saga.step("ship", ship)

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match="no van"):
            await bounded(running.result())
        assert not [name for name in await recorded_steps(app, running) if name.startswith(("c:", "d:"))]


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_replay_keeps_the_numbers_of_the_idempotency_keys(app: App, *, fresh: bool) -> None:
    shop = Shop()

    @app.task(retry=Retry(max_attempts=1))
    async def buy(ctx: Context) -> None:
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, "x", undo=shop.refund)
            await saga.step("ship", shop.ship, payment)

    async with app:
        running = await buy.enqueue()
        await work_off(app)
        await replay(app.producer.gateway, await letter(app, running), Replay(fresh=fresh))
        await work_off(app)
        await bounded(running.result())
        assert shop.keys == ["charge", "charge:1"]
