"""Risky steps: the intent is stored before the act, and an interrupted act is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
import pytest
from perdure import AlreadyDone, App, Context, Retry, current_step
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.worker.durable.steps.codec import fingerprint
from pydantic import BaseModel

from tests.support.workers import Gate, bounded, letter, recorded_steps, running_worker, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("risky")]

AGAIN = Retry(max_attempts=2, base=0.0)


class Receipt(BaseModel):
    number: int


@dataclass
class Bank:
    """Bank that breaks the connection after the first `cut` charges, so that the caller never gets the reply."""

    cut: int = 1
    charges: list[str] = field(default_factory=list)

    async def charge(self, amount: int) -> Receipt:
        self.charges.append(current_step().idempotency_key)
        if len(self.charges) <= self.cut:
            raise ConnectionError("no reply")
        return Receipt(number=len(self.charges) * amount)


async def charge_with(app: App, bank: Bank, **options: Any) -> Any:
    """Run a task with one risky step, and return its handle."""

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Receipt:
        return await ctx.options(risky=True, **options).step("charge", bank.charge, 7)

    handle = await job.enqueue()
    await work_off(app)
    return handle


async def test_the_intent_is_stored_before_the_act(app: App) -> None:
    stored: list[dict[str, bytes]] = []

    @app.task
    async def job(ctx: Context) -> None:
        async def act(amount: int) -> None:
            handle = await app.producer.find(ctx.task_id)
            assert handle is not None
            stored.append(await recorded_steps(app, handle))

        await ctx.options(risky=True).step("act", act, 7)
        await ctx.step("plain", act, 7)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    while_acting, while_plain = stored
    assert list(while_acting) == ["i:act"]
    assert orjson.loads(while_acting["i:act"]) == {"h": fingerprint((7,), {})[0], "a": "7"}
    assert list(while_plain) == ["d:act"]  # the result replaced the intent; a plain step has none


async def test_the_act_waits_for_the_reply_to_the_intent(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    bank = Bank(cut=0)

    @app.task
    async def job(ctx: Context) -> Receipt:
        return await ctx.options(risky=True, durability="async").step("charge", bank.charge, 7)

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(gate.reached.wait())
        await anyio.wait_all_tasks_blocked()
        assert bank.charges == []
        gate.open.set()
        assert await bounded(handle.result()) == Receipt(number=7)


async def test_an_act_that_verify_confirms_is_not_repeated(app: App) -> None:
    bank = Bank()
    asked: list[tuple[int, str]] = []

    async def verify(amount: int) -> AlreadyDone[Receipt] | None:
        asked.append((amount, current_step().idempotency_key))
        return AlreadyDone(Receipt(number=41))

    handle = await charge_with(app, bank, verify=verify)
    assert await bounded(handle.result()) == Receipt(number=41)
    key = f"{handle.id}:charge"
    assert bank.charges == [key]
    assert asked == [(7, key)]
    assert list(await recorded_steps(app, handle)) == ["d:charge"]


async def test_an_act_that_verify_denies_is_repeated_under_the_same_key(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, verify=lambda amount: None)
    assert await bounded(handle.result()) == Receipt(number=14)
    assert bank.charges == [f"{handle.id}:charge"] * 2


async def test_verify_may_confirm_an_act_whose_result_is_none(app: App) -> None:
    calls: list[int] = []

    async def act() -> None:
        calls.append(1)
        raise ConnectionError

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        await ctx.options(risky=True, verify=lambda: AlreadyDone(None)).step("act", act)
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert calls == [1]


async def test_a_sync_verify_runs_in_a_thread(app: App) -> None:
    threads: list[int] = []

    def verify(amount: int) -> AlreadyDone[Receipt]:
        threads.append(threading.get_ident())
        return AlreadyDone(Receipt(number=1))

    handle = await charge_with(app, Bank(), verify=verify)
    await bounded(handle.result())
    assert threads
    assert threads[0] != threading.get_ident()


async def test_verify_runs_between_the_tries_of_one_run(app: App) -> None:
    bank = Bank()
    handle = await charge_with(
        app, bank, retry=Retry(max_attempts=3, base=0.0), verify=lambda amount: AlreadyDone(Receipt(number=5))
    )
    assert await bounded(handle.result()) == Receipt(number=5)
    assert len(bank.charges) == 1
    assert (await handle.record()).attempts == 1


async def test_a_failing_verify_fails_the_attempt_without_an_act(app: App) -> None:
    bank = Bank()
    asked: list[int] = []

    async def verify(amount: int) -> AlreadyDone[Receipt] | None:
        asked.append(amount)
        raise OSError("the bank is closed")

    handle = await charge_with(app, bank, verify=verify)
    found = await letter(app, handle)
    assert found.reason is Reason.ATTEMPTS_EXHAUSTED
    assert found.message == "the bank is closed"
    assert len(bank.charges) == 1
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [True, Receipt(number=1), False])
async def test_verify_must_return_already_done_or_none(app: App, answer: object) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, verify=lambda amount: answer)
    found = await letter(app, handle)
    assert "must return AlreadyDone(result) or None" in found.message
    assert len(bank.charges) == 1


async def test_the_result_from_verify_must_have_the_declared_type(app: App) -> None:
    handle = await charge_with(app, Bank(), verify=lambda amount: AlreadyDone("a receipt, honestly"))
    assert (await letter(app, handle)).reason is Reason.UNSERIALISABLE_RESULT


async def test_without_verify_the_act_is_repeated_under_the_same_key(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank)
    assert await bounded(handle.result()) == Receipt(number=14)
    assert bank.charges == [f"{handle.id}:charge"] * 2


async def test_in_doubt_fail_buries_the_task(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, in_doubt="fail")
    found = await letter(app, handle)
    assert found.reason is Reason.IN_DOUBT
    assert f"idempotency key {handle.id}:charge" in found.message
    assert len(bank.charges) == 1


async def test_a_replay_keeps_the_doubt_unless_it_is_fresh(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, in_doubt="fail")
    gateway = app.producer.gateway
    assert await replay(gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.IN_DOUBT
    assert len(bank.charges) == 1
    assert await replay(gateway, await letter(app, handle), Replay(fresh=True))
    await work_off(app)
    assert await bounded(handle.result()) == Receipt(number=14)


@pytest.mark.parametrize("risky", [True, False])
async def test_a_finished_step_is_never_in_doubt(app: App, risky: bool) -> None:
    asked: list[int] = []
    verify: Callable[[int], Any] | None = asked.append if risky else None
    bank = Bank(cut=0)

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Receipt:
        receipt = await ctx.options(risky=risky, verify=verify).step("charge", bank.charge, 7)
        if ctx.attempt == 1:
            raise ConnectionError
        return receipt

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == Receipt(number=7)
    assert len(bank.charges) == 1
    assert asked == []
