"""`perdure budget`: what was spent, raises and resets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from perdure.queues import Producer
from perdure.queues.budgets.definition import ledger_id
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse, Envelope
from perdure.worker.settings import Settings

from tests.support.command_line import Answer, call

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]

ACME = BudgetUse(ledger_id("tenant", ["acme"]), "tenant", {"usd": 5_000_000_000}, 86_400_000, label="acme")
INIT = BudgetUse(ledger_id("tenant", ["init"]), "tenant", {"usd": 5_000_000_000}, 86_400_000, label="init")
TASK = BudgetUse("t1", "", {"tokens": 1000, "seconds": 60_000})


async def tool(*args: str) -> Answer:
    return await asyncio.to_thread(call, "budget", *args)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[BudgetStore]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield BudgetStore(producer.gateway, producer.namespace)


async def test_a_list_shows_what_was_spent_of_each_key(store: BudgetStore) -> None:
    assert "nothing was charged to a named budget" in (await tool("list")).err
    await store.charge([ACME, TASK], "a", {"usd": 5_100_000_000, "tokens": 7})
    await store.charge([INIT], "b", {"usd": 1_250_000_000})
    init, acme = (await tool("list", "--json")).json
    assert (init["key"], init["spent"]["usd"], init["limits"]) == ("init", 1.25, {"usd": 5.0})
    assert (acme["key"], acme["spent"]["usd"], acme["name"]) == ("acme", 5.1, "tenant")
    answer = await tool("list", "--wide")
    assert "$5.10 of $5.00 (102%)" in answer.out
    assert answer.out.count("used up") == 1
    assert "nothing was charged" in (await tool("list", "other")).err


async def test_show_finds_a_task_a_name_and_a_key(store: BudgetStore) -> None:
    await store.charge([ACME, TASK], "a", {"usd": 1_000_000_000, "tokens": 250, "seconds": 1500})
    assert (await tool("show", "t1", "--json")).json["spent"] == {"tokens": 250, "usd": 1.0, "seconds": 1.5}
    assert (await tool("show", "tenant", "--json")).json["key"] == "acme"
    await store.charge([INIT], "b", {"usd": 1})
    answer = await tool("show", "tenant")
    assert answer.code == 1
    assert "has 2 keys" in answer.err
    assert ACME.ledger in answer.err
    assert "250 of 1,000 (25%)" in (await tool("show", "t1")).out
    assert "$1.00 of $5.00 (20%)" in (await tool("show", ACME.ledger)).out


async def test_an_unknown_budget_is_named(store: BudgetStore) -> None:
    await store.charge([ACME], "a", {"usd": 1})
    for command in ("show", "reset", "raise"):
        answer = await tool(command, "tenent", *(["--usd", "1"] if command == "raise" else []))
        assert (answer.code, answer.out) == (1, "")
        assert "nothing was charged to a budget 'tenent'" in answer.err
        assert "did you mean 'tenant'?" in answer.err


async def test_a_raise_adds_to_what_the_budget_limits(store: BudgetStore) -> None:
    await store.charge([TASK], "a", {"tokens": 1000})
    answer = await tool("raise", "t1", "--tokens", "500", "--seconds", "2m", "--by", "ann")
    assert answer.code == 0
    assert "added 500 tokens, 2.0 min to budget t1" in answer.err
    assert "1,000 of 1,500 (67%), 500 of it added" in answer.out
    (standing,) = await store.charge([TASK], "", {})
    assert (standing.left("tokens"), standing.limits["seconds"]) == (500, 180_000)
    assert (await tool("show", "t1", "--json")).json["raised_by"] == "ann"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give what to add: --tokens, --usd, --steps or --seconds"),
        (["--usd", "1"], "budget t1 does not limit usd: give --tokens, --seconds"),
        (["--tokens", "0"], "must be a whole number, 1 or more"),
        (["--tokens", "1.5"], "must be a whole number, 1 or more"),
        (["--usd", "much"], "must be a number of dollars, such as 1.50"),
        (["--seconds", "soon"], "must be"),
    ],
)
async def test_a_raise_of_what_is_no_amount_changes_nothing(
    store: BudgetStore, options: list[str], message: str
) -> None:
    await store.charge([TASK], "a", {"tokens": 1000})
    answer = await tool("raise", "t1", *options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    (standing,) = await store.charge([TASK], "", {})
    assert standing.raises == 0


async def test_a_reset_begins_again(store: BudgetStore) -> None:
    await store.charge([ACME], "a", {"usd": 5_000_000_000})
    assert "add --yes" in (await tool("reset", "tenant")).err
    answer = await tool("reset", "tenant", "--yes")
    assert "$0.00 of $5.00 (0%), and $5.00 before the last reset" in answer.out
    (standing,) = await store.charge([ACME], "", {})
    assert (standing.left("usd"), standing.used_up) == (5_000_000_000, ())


async def test_the_budgets_of_a_task_are_shown_with_it(store: BudgetStore, settings: Settings) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        parent, child = [await producer.enqueue("work", queue="default") for _ in range(2)]
        show = partial(asyncio.to_thread, call, "task", "show")
        assert "budget" not in (await show(child.id)).out
        own, above = BudgetUse(child.id, "", {"tokens": 1000, "steps": 5}), BudgetUse(parent.id, "", {"usd": 10**9})
        await store.charge([own, above, ACME], "a", {"usd": 5 * 10**8, "tokens": 250, "steps": 1})
        envelope = Envelope(id=child.id, task="work", parent=parent.id, budgets=(above, ACME)).encode()
        await producer.gateway.command("HSET", child.partition.record(child.id), "env", envelope)
        out = " ".join((await show(child.id)).out.split())
        assert "budget tokens 250 of 1,000 (25%); steps 1 of 5 (20%)" in out
        assert f"of task {parent.id}: $0.50 of $1.00 (50%)" in out
        assert f"{ACME.ledger}: $0.50 of $5.00 (10%)" in out
        budgets = (await show(child.id, "--json")).json["budgets"]
        assert [budget["ledger"] for budget in budgets] == [child.id, parent.id, ACME.ledger]
        await parent.cancel()
        await child.cancel()


async def test_named_budgets_have_metrics(store: BudgetStore, namespace_name: str) -> None:
    await store.charge([TASK, ACME], "a", {"usd": 1_250_000_000, "tokens": 250})
    await store.charge([INIT], "b", {"usd": 1})
    await store.raise_(ACME.ledger, {"usd": 10**9})
    out = (await asyncio.to_thread(call, "queue", "metrics")).out
    labels = f'{{budget="tenant",key="{ACME.ledger.partition(":")[2]}",namespace="{namespace_name}",unit="usd"}}'
    assert f"perdure_budget_spent{labels} 1.25" in out
    assert f"perdure_budget_limit{labels} 6.0" in out
    assert out.count("perdure_budget_spent{") == 2, "units that it does not limit, and budgets of a task, have none"
