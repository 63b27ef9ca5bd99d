"""Definitions of budgets: what is refused, with one sentence; amounts as Redis counts them; ledgers of a task."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure import App, Budget, Context
from perdure.queues.budgets.definition import (
    UNITS,
    TaskBudgets,
    amount_text,
    amounts_text,
    budget_name,
    check_budgets,
    from_amount,
    ledger_id,
    parse_amount,
    task_budgets,
    to_amount,
)
from perdure.queues.catalog import CatalogTask
from perdure.queues.envelope import MAX_AMOUNT, MAX_BUDGETS, BudgetUse, Envelope
from perdure.queues.errors import InvalidBudgetUse, UnreadableEnvelope

OWN = Budget(tokens=100)
TENANT = Budget(usd=5, name="tenant", by="tenant", per="1d", then="bury")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "a budget must have an amount: give tokens, usd, steps or seconds"),
        ({"tokens": 0}, "tokens of a budget must be a whole number, 1 or more, got 0"),
        ({"tokens": True}, "tokens of a budget must be a whole number, 1 or more, got True"),
        ({"steps": 2.5}, "steps of a budget must be a whole number, 1 or more, got 2.5"),
        ({"steps": MAX_AMOUNT + 1}, "steps of a budget must be a whole number"),
        ({"usd": -1}, "usd of a budget must be more than 0 and at most 9,007,199, got -1"),
        ({"usd": float("nan")}, "usd of a budget must be more than 0 and at most 9,007,199, got nan"),
        ({"usd": float("inf")}, "usd of a budget must be more than 0"),
        ({"usd": Decimal("1e99999")}, "usd of a budget must be more than 0"),
        ({"usd": "5"}, "usd of a budget must be a number, got '5'"),
        ({"usd": True}, "usd of a budget must be a number, got True"),
        ({"seconds": 0}, "seconds of a budget must be more than 0"),
        ({"seconds": timedelta(seconds=-1)}, "seconds of a budget must be more than 0"),
        ({"seconds": float("nan")}, "seconds of a budget must be a number of seconds, got nan"),
        ({"seconds": "1h"}, "seconds of a budget must be seconds or a timedelta, got '1h'"),
        ({"tokens": 1, "name": "a b"}, "the name of a budget must be 1 to 64 letters"),
        (
            {"tokens": 1, "per": 60},
            "per of a budget must go with a name, which tasks share: Budget(name='tenant', ...)",
        ),
        ({"tokens": 1, "by": "a"}, "by of a budget must go with a name"),
        ({"tokens": 1, "name": "n", "by": []}, "by of budget 'n' must be names of arguments, each once"),
        ({"tokens": 1, "name": "n", "per": 0}, "per of budget 'n' must be at least 1 ms and at most 400 days, got 0"),
        ({"tokens": 1, "name": "n", "per": "401d"}, "per of budget 'n' must be at least 1 ms and at most 400 days"),
        ({"tokens": 1, "name": "n", "per": "soon"}, "per of budget 'n' must be a number of seconds, greater than 0"),
        ({"tokens": 1, "name": "n", "per": "0s"}, "per of budget 'n' must be a number of seconds, greater than 0"),
        ({"tokens": 1, "name": "n", "per": True}, "per of budget 'n' must be seconds, a timedelta or such as '1d'"),
        ({"tokens": 1, "name": "n", "per": []}, "per of budget 'n' must be seconds, a timedelta or such as '1d'"),
        ({"tokens": 1, "then": "stop"}, "then of a budget must be 'ask', 'hand_off' or 'bury', got 'stop'"),
        ({"tokens": 1, "then": "hand_off"}, "to of a budget, the task that continues the work, must go with then="),
        ({"tokens": 1, "to": "other"}, "to of a budget, the task that continues the work, must go with then="),
        ({"tokens": 1, "then": "hand_off", "to": 5}, "to of a budget must be a task, an agent, or the name of one"),
        ({"tokens": 1, "then": "hand_off", "to": ""}, "to of a budget must be a task, an agent, or the name of one"),
    ],
)
def test_a_bad_budget_is_refused_with_one_sentence(given: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        Budget(**given)
    assert str(refused.value).startswith(problem)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("budgets", "problem"),
    [
        (5, "budget must be a Budget, such as Budget"),
        ([OWN, "x"], "budget must be a Budget, such as Budget"),
        ([OWN, Budget(usd=1)], "a task must have each budget once, got without a name twice"),
        ([TENANT, Budget(usd=1, name="tenant")], "a task must have each budget once, got tenant twice"),
        ([Budget(usd=1, name=f"n{at}") for at in range(5)], "a task must have at most 4 budgets, got 5"),
    ],
)
def test_a_task_has_at_most_four_budgets_each_once(budgets: object, problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        check_budgets(budgets)


def test_amounts_are_whole_numbers_and_money_is_exact() -> None:
    budget = Budget(tokens=5, usd=0.1, steps=2, seconds=timedelta(minutes=1))
    assert budget.limits == {"tokens": 5, "usd": 100_000_000, "steps": 2, "seconds": 60_000}
    assert to_amount("usd", Decimal("9007199")) == 9_007_199_000_000_000 <= MAX_AMOUNT
    assert to_amount("usd", 1e-12) == 1, "what is spent is never nothing"
    assert sum(to_amount("usd", 0.1) for _ in range(10)) == to_amount("usd", 1)


def test_a_window_is_seconds_a_timedelta_or_a_text() -> None:
    windows = [Budget(usd=1, name="n", per=per).window_ms for per in (1.5, timedelta(days=1), "1d", "90min")]
    assert windows == [1500, 86_400_000, 86_400_000, 5_400_000]
    assert OWN.window_ms is None


@given(st.sampled_from(UNITS), st.integers(1, MAX_AMOUNT))
def test_an_amount_that_is_printed_is_read_again(unit: str, amount: int) -> None:
    if unit == "usd":
        shown = f"{Decimal(amount) / 10**9:f}"
        assert amount > 9_007_199 * 10**9 or parse_amount(unit, shown) == amount
    elif unit == "seconds":
        shown = f"{Decimal(amount) / 1000:f}"
        assert amount > 10**15 or parse_amount(unit, shown) == amount  # a float has 15 digits
    else:
        assert parse_amount(unit, amount_text(unit, amount, bare=True)) == from_amount(unit, amount) == amount


@pytest.mark.parametrize(
    ("unit", "text"),
    [("tokens", "-1"), ("tokens", "1.5"), ("steps", "٣"), ("usd", "five"), ("usd", "NaN"), ("usd", "")],
)
def test_what_is_no_amount_is_refused(unit: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"must be (a whole number|a number of dollars|more than 0)"):
        parse_amount(unit, text)


def test_amounts_as_people_read_them() -> None:
    amounts = {"usd": 1_250_000_000, "tokens": 200_000, "steps": 1, "seconds": 90_000}
    assert amounts_text(amounts) == "200,000 tokens, $1.25, 1 step, 1.5 min"
    assert amounts_text({}) == "nothing"
    assert [amount_text("usd", amount) for amount in (4_500_000, 12, 10**13 + 1)] == [
        "$0.0045",
        "$0.000000012",
        "$10,000.00",
    ]


def test_the_ledgers_of_a_task() -> None:
    budgets = TaskBudgets((OWN, TENANT, Budget(steps=9, name="all")), "work", {"tenant": "none"})
    own, tenant, shared = task_budgets(budgets, "id", {"tenant": "acme", "n": 1})
    assert own == BudgetUse("id", "", {"tokens": 100})
    assert tenant == BudgetUse(
        ledger_id("tenant", ["acme"]), "tenant", {"usd": 5 * 10**9}, 86_400_000, "bury", None, "acme"
    )
    assert (shared.ledger, shared.label) == ("all:-", "")
    assert [budget_name(use.ledger) for use in (own, tenant, shared)] == ["", "tenant", "all"]
    assert task_budgets(budgets, "id", {})[1].label == "none", "the default of the argument"
    assert ledger_id("tenant", ["acme"]) != ledger_id("other", ["acme"])
    assert task_budgets(None, "id", {}) == ()


def test_the_catalog_lists_the_budgets_of_a_task() -> None:
    shared = Budget(steps=2, name="n", by=lambda _: "x")
    listed = [*TaskBudgets((OWN, TENANT, shared), "work").published(), {"name": 5}]
    texts = ["100 tokens", "tenant by tenant: $5.00 per 1.0 days", "n by a function: 2 steps"]
    found: list[Any] = [listed[:3], listed, "x", None]
    assert [CatalogTask("work", "q", budgets=one).budget_texts for one in found] == [texts, [], [], []]


def test_workers_publish_the_budgets_of_their_tasks() -> None:
    app = App("shop")

    @app.task(budget=[OWN, TENANT])
    async def work(ctx: Context, tenant: str) -> None: ...

    @app.task
    async def other(ctx: Context) -> None: ...

    published = {task["name"]: task["budgets"] for task in orjson.loads(app.tasks.entry("shop").data)["tasks"]}
    texts = {name: CatalogTask(name, "shop", budgets=found).budget_texts for name, found in published.items()}
    assert texts == {"other": [], "work": ["100 tokens", "tenant by tenant: $5.00 per 1.0 days"]}


def test_a_key_may_be_made_by_a_function() -> None:
    budgets = TaskBudgets((Budget(usd=1, name="n", by=lambda given: (given["a"], given["b"])),), "work")
    (use,) = task_budgets(budgets, "id", {"a": "x", "b": 2})
    assert (use.ledger, use.label) == (ledger_id("n", ["x", 2]), "x, 2")
    with pytest.raises(InvalidBudgetUse, match="key of budget 'n': could not be made by its function: KeyError: 'a'"):
        task_budgets(budgets, "id", {})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "'tenant' is missing in the arguments"),
        ({"tenant": ["x"]}, "'tenant' must be a text, a number, true, false or null, got list"),
        ({"tenant": "x", "token": "y"}, "'tenant' must not be a secret: name other arguments in by="),
    ],
)
def test_arguments_that_make_no_key_are_refused(arguments: dict[str, Any], problem: str) -> None:
    secrets = ["tenant"] if "token" in arguments else []
    with pytest.raises(InvalidBudgetUse, match="task 'work': key of budget 'tenant': ") as refused:
        task_budgets(TaskBudgets((TENANT,), "work"), "id", arguments, secrets=secrets)
    assert str(refused.value).endswith(problem)


def test_a_child_is_charged_to_the_budgets_of_its_parents_too() -> None:
    parent = task_budgets(TaskBudgets((OWN, TENANT), "work"), "parent", {"tenant": "acme"})
    child = task_budgets(TaskBudgets((Budget(steps=3), TENANT), "child"), "child", {"tenant": "acme"}, inherited=parent)
    assert [use.ledger for use in child] == ["parent", ledger_id("tenant", ["acme"]), "child"]
    many = [BudgetUse(f"t{at}", "", {"steps": 1}) for at in range(MAX_BUDGETS)]
    assert len(task_budgets(None, "x", {}, inherited=many)) == MAX_BUDGETS
    with pytest.raises(InvalidBudgetUse, match=f"charged to {MAX_BUDGETS + 1} budgets, and the most is {MAX_BUDGETS}"):
        task_budgets(TaskBudgets((OWN,), "work"), "x", {}, inherited=many)


def test_an_envelope_has_the_budgets_without_the_text_of_their_keys() -> None:
    uses = task_budgets(TaskBudgets((OWN, TENANT), "work"), "id", {"tenant": "acme"})
    data = Envelope(id="child", task="t", budgets=uses).encode()
    assert b"acme" not in data
    assert Envelope.decode(data).budgets == tuple(use._replace(label="") for use in uses)


@pytest.mark.parametrize(
    "use",
    [
        ["x:y", "", {"tokens": 1}],
        ["x", "", {"gold": 1}],
        ["x", "", {"tokens": 0}],
        ["x", "", {"tokens": 1}, 0],
        ["x", "", {"tokens": 1}, None, "stop"],
    ],
)
def test_an_envelope_with_a_bad_budget_is_refused(use: list[Any]) -> None:
    with pytest.raises(UnreadableEnvelope, match="budgets"):
        Envelope.decode(orjson.dumps({"v": 1, "id": "a", "task": "t", "budgets": [use]}))
