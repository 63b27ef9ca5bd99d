"""Ledgers of budgets: each charge counts once, windows end, raises and resets, and one task asks."""

from __future__ import annotations

import asyncio
import random

import pytest
from perdure.queues import Gateway, Namespace
from perdure.queues.budgets.store import BudgetStore, Standing
from perdure.queues.envelope import MAX_AMOUNT, BudgetUse
from perdure.queues.errors import BudgetNotFound
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import needs_one_server
from tests.support.lossy_proxy import lossy_gateway

pytestmark = pytest.mark.integration

TASK = BudgetUse("t1", "", {"tokens": 100})
TENANT = BudgetUse("tenant:00112233445566ff", "tenant", {"usd": 1000, "steps": 10}, label="acme")


async def charge(gateway: Gateway, namespace: Namespace, nonce: str, use: BudgetUse = TASK, **amounts: int) -> Standing:
    (standing,) = await BudgetStore(gateway, namespace).charge([use], nonce, amounts)
    return standing


async def test_charges_add_up_and_a_look_changes_nothing(gateway: Gateway, namespace: Namespace) -> None:
    await charge(gateway, namespace, "", tokens=5)
    assert not await gateway.command("EXISTS", namespace.ledger("t1").ledger)
    await charge(gateway, namespace, "a", tokens=30, steps=2)
    found = await charge(gateway, namespace, "b", tokens=5)
    look = await charge(gateway, namespace, "")
    assert found == look
    assert found.spent == {"tokens": 35, "usd": 0, "steps": 2, "seconds": 0}
    assert (found.left("tokens"), found.used_up, found.ends_ms) == (65, (), None)


async def test_a_nonce_charges_each_ledger_once(gateway: Gateway, namespace: Namespace) -> None:
    store = BudgetStore(gateway, namespace)
    await asyncio.gather(*(store.charge([TASK, TENANT], "a", {"tokens": 30, "usd": 7}) for _ in range(5)))
    first, second = await store.charge([TASK, TENANT], "", {})
    assert (first.spent["tokens"], second.spent["usd"]) == (30, 7)


async def test_a_notice_is_given_once_for_each_raise_and_again_to_a_repeated_call(
    gateway: Gateway, namespace: Namespace
) -> None:
    notices = [
        (await charge(gateway, namespace, nonce, tokens=n)).notice
        for nonce, n in (("a", 79), ("b", 1), ("b", 1), ("c", 1))
    ]
    assert notices == [False, True, True, False]
    await BudgetStore(gateway, namespace).raise_("t1", {"tokens": 20})
    notices = [
        (await charge(gateway, namespace, nonce, tokens=n)).notice for nonce, n in (("d", 1), ("e", 14), ("f", 1))
    ]
    assert notices == [False, True, False]


async def test_a_raise_adds_and_a_number_makes_it_conditional(gateway: Gateway, namespace: Namespace) -> None:
    store = BudgetStore(gateway, namespace)
    with pytest.raises(BudgetNotFound, match="nothing was charged to budget t1"):
        await store.raise_("t1", {"tokens": 1})
    before = await charge(gateway, namespace, "a", tokens=100)
    assert before.used_up == ("tokens",)
    assert await store.raise_("t1", {"tokens": 50}, number=before.raises)
    assert not await store.raise_("t1", {"tokens": 50}, number=before.raises)
    after = await charge(gateway, namespace, "")
    assert (after.limits, after.left("tokens"), after.raises) == ({"tokens": 150}, 50, before.raises + 1)


async def test_a_reset_forgets_what_was_spent_and_keeps_the_total(gateway: Gateway, namespace: Namespace) -> None:
    store = BudgetStore(gateway, namespace)
    assert not await store.reset(TENANT.ledger)
    await charge(gateway, namespace, "a", TENANT, usd=900, steps=3)
    await store.raise_(TENANT.ledger, {"usd": 50}, by="ann@desk")
    assert await store.reset(TENANT.ledger, by="bob@desk")
    found = await charge(gateway, namespace, "b", TENANT, usd=1)
    assert (found.spent["usd"], found.spent["steps"], found.limits) == (1, 0, {"usd": 1000, "steps": 10})
    ledger = await store.load(TENANT.ledger)
    assert ledger is not None
    assert (ledger.label, ledger.total, ledger.by) == ("acme", {"usd": 900, "steps": 3}, "bob@desk")


async def test_a_window_ends_and_the_next_one_has_another_number(gateway: Gateway, namespace: Namespace) -> None:
    use = TENANT._replace(window_ms=60_000)
    first = await charge(gateway, namespace, "a", use, usd=1000)
    later = await charge(gateway, namespace, "b", use, usd=1)
    assert first.ends_ms is not None
    assert (later.ends_ms, later.used_up) == (first.ends_ms, ("usd",))
    key = namespace.ledger(use.ledger).ledger
    assert 0 < await gateway.command("PTTL", key) <= 60_000
    await gateway.command("PEXPIRE", key, 1)
    while await gateway.command("EXISTS", key):
        pass
    assert (await charge(gateway, namespace, "", use)).spent["usd"] == 0
    await charge(gateway, namespace, "a", use, usd=1000)  # late bytes of the first window
    second = await charge(gateway, namespace, "c", use, usd=5)
    assert second.spent["usd"] == 5
    assert second.raises > first.raises


async def test_a_window_that_has_started_ends_also_if_others_have_none(gateway: Gateway, namespace: Namespace) -> None:
    windowed = TENANT._replace(window_ms=60_000)
    await charge(gateway, namespace, "a", usd=1, use=TENANT)
    started = await charge(gateway, namespace, "b", usd=1, use=windowed)
    other = await charge(gateway, namespace, "c", usd=1, use=TENANT)
    assert started.ends_ms is not None
    assert (other.ends_ms, other.spent["usd"]) == (started.ends_ms, 3)
    assert 0 < await gateway.command("PTTL", namespace.ledger(TENANT.ledger).ledger) <= 60_000


async def test_amounts_stay_numbers_whatever_another_program_wrote(gateway: Gateway, namespace: Namespace) -> None:
    store, key = BudgetStore(gateway, namespace), namespace.ledger("t1")
    for nonce in "abc":
        await charge(gateway, namespace, nonce, tokens=MAX_AMOUNT)
        await store.raise_("t1", {"tokens": MAX_AMOUNT})
    found = await charge(gateway, namespace, "")
    assert (found.spent["tokens"], found.limits) == (MAX_AMOUNT, {"tokens": MAX_AMOUNT + 100})
    await gateway.command(
        "HSET", key.ledger, "spent_tokens", "nan", "kept", "soon", "raised_tokens", "-5", "number", "x"
    )
    found = await charge(gateway, namespace, "d", tokens=7)
    assert (found.spent["tokens"], found.limits, found.raises) == (7, {"tokens": 100}, 0)
    assert await gateway.command("PTTL", key.ledger) > 0
    assert (await charge(gateway, namespace, "d", tokens=7)).spent["tokens"] == 7


async def test_only_the_last_nonces_are_kept(gateway: Gateway, namespace: Namespace) -> None:
    charged = namespace.ledger("t1").charged
    seconds, _ = await gateway.command("TIME", node_of=charged)
    for start in range(0, 100_000, 10_000):
        pairs = [item for at in range(start, start + 10_000) for item in (int(seconds) * 1000, f"{at:06}")]
        await gateway.command("ZADD", charged, *pairs)
    await charge(gateway, namespace, "a", tokens=1)
    assert await gateway.command("ZCARD", charged) == 100_000
    assert (await charge(gateway, namespace, "a", tokens=1)).spent["tokens"] == 1


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_calls_is_counted_as_a_reference_counts_it(
    gateway: Gateway, namespace: Namespace, seed: int
) -> None:
    """Charges, some of which are repeated at any later time, raises and resets."""
    chance, store = random.Random(seed), BudgetStore(gateway, namespace)
    spent, total, raised, number = 0, 0, 0, 0
    sent: dict[str, int] = {}
    for at in range(120):
        act = chance.choice(("charge", "charge", "again", "raise", "reset")) if sent else "charge"
        if act == "charge":
            sent[f"n{at}"] = amount = chance.randrange(1, 50)
            spent += amount
            await charge(gateway, namespace, f"n{at}", tokens=amount)
        elif act == "again":
            nonce = chance.choice(sorted(sent))
            await charge(gateway, namespace, nonce, tokens=sent[nonce])
        elif act == "raise":
            raised += at + 1
            number += 1
            assert await store.raise_("t1", {"tokens": at + 1}, number=number - 1)
            assert not await store.raise_("t1", {"tokens": at + 1}, number=number - 1)
        else:
            total, spent, raised, number = total + spent, 0, 0, number + 1
            assert await store.reset("t1")
        found = await charge(gateway, namespace, "")
        assert (found.spent["tokens"], found.limits["tokens"], found.raises) == (spent, 100 + raised, number)
    ledger = await store.load("t1")
    assert ledger is not None
    assert ledger.total.get("tokens", 0) == total
    assert sum(sent.values()) == total + spent


async def test_one_task_asks_until_it_is_gone_or_the_budget_is_raised(gateway: Gateway, namespace: Namespace) -> None:
    store, place = BudgetStore(gateway, namespace), namespace.partition("default")
    number = (await charge(gateway, namespace, "a", tokens=100)).raises
    assert await store.wait("t1", place, "t1", number) is True
    assert await store.wait("t1", place, "t2", number) is False
    assert await store.wait("t1", place, "t1", number) is True
    await gateway.command("ZREM", namespace.ledger("t1").waiting, "default/0/task:t1")
    assert await store.wait("t1", place, "t2", number) is True
    await store.raise_("t1", {"tokens": 1})
    assert await store.wait("t1", place, "t2", number) is None


async def test_every_key_expires(gateway: Gateway, namespace: Namespace) -> None:
    store = BudgetStore(gateway, namespace)
    number = (await charge(gateway, namespace, "a", TENANT, usd=1)).raises
    await store.wait(TENANT.ledger, namespace.partition("default"), "t1", number)
    ledger = namespace.ledger(TENANT.ledger)
    for key in (ledger.ledger, ledger.charged, ledger.waiting, ledger.named):
        assert await gateway.command("PTTL", key) > 0, key
    await charge(gateway, namespace, "b", tokens=1)
    await store.keep("t1", 60)
    await charge(gateway, namespace, "c", tokens=1)
    assert 0 < await gateway.command("PTTL", namespace.ledger("t1").ledger) <= 60_000


async def test_named_ledgers_are_listed(gateway: Gateway, namespace: Namespace) -> None:
    store = BudgetStore(gateway, namespace)
    await charge(gateway, namespace, "a", tokens=1)
    for at in range(20):
        await charge(gateway, namespace, "a", TENANT._replace(ledger=f"tenant:{at:016x}"), usd=at)
    await charge(gateway, namespace, "a", TENANT._replace(ledger="other:-", name="other"), usd=1)
    assert len(await store.list_named()) == 21
    assert [one.ledger for one in await store.list_named("other")] == ["other:-"]


async def test_a_charge_and_a_raise_count_once_if_their_replies_are_lost(
    gateway: Gateway, namespace: Namespace
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        await charge(lossy, namespace, "a", tokens=1)
        line.lose(queue_script("charge_budget").sha.encode())
        assert (await charge(lossy, namespace, "b", tokens=10)).spent["tokens"] == 11
        line.lose(queue_script("raise_budget").sha.encode())
        assert await BudgetStore(lossy, namespace).raise_("t1", {"tokens": 5}, number=0)
        assert line.lost == 2
    found = await charge(gateway, namespace, "")
    assert (found.spent["tokens"], found.limits, found.raises) == (11, {"tokens": 105}, 1)
