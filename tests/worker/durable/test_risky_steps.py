"""Risky steps: the intent is stored before the act, and what became of a cut-off act is found out."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
import pytest
from perdure import AlreadyDone, App, Context, Retry, Settings, current_step
from perdure.deadletter import Reason, Replay, replay
from pydantic import BaseModel

from tests.support.workers import Gate, letter, recorded_steps, soon, work_off, working

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)


class Receipt(BaseModel):
    number: int


@dataclass
class Bank:
    """Charges, and breaks the connection after the charge `cut` times: the caller never learns that it was made."""

    cut: int = 1
    charges: list[str] = field(default_factory=list)

    async def charge(self, amount: int) -> Receipt:
        self.charges.append(current_step().idempotency_key)
        if len(self.charges) <= self.cut:
            raise ConnectionError("no reply")
        return Receipt(number=len(self.charges) * amount)


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with App("risky", settings=settings) as app:
        yield app


async def charge_with(app: App, bank: Bank, **options: Any) -> Any:
    """Enqueue a task with one risky step, work it off, return its handle."""

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Receipt:
        return await ctx.step("charge", bank.charge, 7, risky=True, **options)

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

        await ctx.step("act", act, 7, risky=True)
        await ctx.step("plain", act, 7)

    handle = await job.enqueue()
    await work_off(app)
    await soon(handle.result())
    while_acting, while_plain = stored
    assert list(while_acting) == ["i:act"]
    assert orjson.loads(while_acting["i:act"]) == {"a": "7"}
    assert list(while_plain) == ["d:act"]  # the result took the intent's place, and a plain step has none


async def test_nothing_is_done_before_the_intent_has_arrived(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    bank = Bank(cut=0)

    @app.task
    async def job(ctx: Context) -> Receipt:
        return await ctx.step("charge", bank.charge, 7, risky=True, durability="async")

    async with working(app):
        handle = await job.enqueue()
        await soon(gate.reached.wait())
        await anyio.wait_all_tasks_blocked()
        assert bank.charges == []
        gate.open.set()
        assert await soon(handle.result()) == Receipt(number=7)


async def test_verify_finds_that_it_happened_and_the_act_is_not_repeated(app: App) -> None:
    bank = Bank()
    asked: list[tuple[int, str]] = []

    async def verify(amount: int) -> AlreadyDone[Receipt] | None:
        asked.append((amount, current_step().idempotency_key))
        return AlreadyDone(Receipt(number=41))

    handle = await charge_with(app, bank, verify=verify)
    assert await soon(handle.result()) == Receipt(number=41)
    key = f"{handle.id}:charge"
    assert bank.charges == [key]
    assert asked == [(7, key)]
    assert list(await recorded_steps(app, handle)) == ["d:charge"]


async def test_verify_finds_that_it_did_not_happen_and_the_act_is_done_under_the_same_key(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, verify=lambda amount: None)
    assert await soon(handle.result()) == Receipt(number=14)
    assert bank.charges == [f"{handle.id}:charge"] * 2


async def test_an_act_without_a_result_has_happened_all_the_same(app: App) -> None:
    calls: list[int] = []

    async def act() -> None:
        calls.append(1)
        raise ConnectionError

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        await ctx.step("act", act, risky=True, verify=lambda: AlreadyDone(None))
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert await soon(handle.result()) == "done"
    assert calls == [1]


async def test_a_sync_verify_runs_in_a_thread(app: App) -> None:
    threads: list[int] = []

    def verify(amount: int) -> AlreadyDone[Receipt]:
        threads.append(threading.get_ident())
        return AlreadyDone(Receipt(number=1))

    handle = await charge_with(app, Bank(), verify=verify)
    await soon(handle.result())
    assert threads
    assert threads[0] != threading.get_ident()


async def test_the_doubt_is_cleared_between_the_tries_of_one_run_too(app: App) -> None:
    bank = Bank()
    handle = await charge_with(
        app, bank, retry=Retry(max_attempts=3, base=0.0), verify=lambda amount: AlreadyDone(Receipt(number=5))
    )
    assert await soon(handle.result()) == Receipt(number=5)
    assert len(bank.charges) == 1
    assert (await handle.record()).attempts == 1


async def test_a_verify_that_fails_is_a_failed_attempt_and_never_an_act(app: App) -> None:
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
async def test_a_verify_must_answer_clearly(app: App, answer: object) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, verify=lambda amount: answer)
    found = await letter(app, handle)
    assert "must return Happened(result) or None" in found.message
    assert len(bank.charges) == 1


async def test_what_verify_says_has_to_be_of_the_type_the_step_declares(app: App) -> None:
    handle = await charge_with(app, Bank(), verify=lambda amount: AlreadyDone("a receipt, honestly"))
    assert (await letter(app, handle)).reason is Reason.UNSERIALISABLE_RESULT


async def test_without_verify_it_acts_again_under_the_same_key(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank)
    assert await soon(handle.result()) == Receipt(number=14)
    assert bank.charges == [f"{handle.id}:charge"] * 2


async def test_in_doubt_fail_leaves_it_to_a_person(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, in_doubt="fail")
    found = await letter(app, handle)
    assert found.reason is Reason.IN_DOUBT
    assert f"idempotency key {handle.id}:charge" in found.message
    assert len(bank.charges) == 1


async def test_a_replay_is_still_in_doubt_unless_it_starts_afresh(app: App) -> None:
    bank = Bank()
    handle = await charge_with(app, bank, in_doubt="fail")
    gateway = app.producer.gateway
    assert await replay(gateway, await letter(app, handle), Replay())
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.IN_DOUBT
    assert len(bank.charges) == 1
    assert await replay(gateway, await letter(app, handle), Replay(fresh=True))
    await work_off(app)
    assert await soon(handle.result()) == Receipt(number=14)


@pytest.mark.parametrize("risky", [True, False])
async def test_a_finished_step_is_never_in_doubt(app: App, risky: bool) -> None:
    asked: list[int] = []
    verify: Callable[[int], Any] | None = asked.append if risky else None
    bank = Bank(cut=0)

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Receipt:
        receipt = await ctx.step("charge", bank.charge, 7, risky=risky, verify=verify)
        if ctx.attempt == 1:
            raise ConnectionError
        return receipt

    handle = await job.enqueue()
    await work_off(app)
    assert await soon(handle.result()) == Receipt(number=7)
    assert len(bank.charges) == 1
    assert asked == []
