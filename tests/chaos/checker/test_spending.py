"""The rule of budgets finds each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, parse

Event = tuple[float, str, dict[str, Any]]


def rules(*events: Event, spent: int | None) -> set[str]:
    """Return the violated rules of a run at whose end so much is spent."""
    purse = [] if spent is None else [(90.0, "purse", {"tenant": "a", "spent": spent})]
    texts = [
        orjson.dumps({"at": round(at * SECOND), "pid": 1, "what": what, **data})
        for at, what, data in [(0.0, "begins", {"lease": 2.0}), *events, *purse, (91.0, "ends", {})]
    ]
    return {violation.rule for violation in violations(parse(texts))}


def charge(at: float, *, confirmed: bool = True) -> list[Event]:
    told = {"tenant": "a", "token": f"t{at}"}
    return [(at, "buys", told), *([(at + 0.1, "bought", told)] if confirmed else [])]


def test_charges_that_count_once_violate_nothing() -> None:
    assert rules(*charge(1), *charge(2), spent=2) == set()


@pytest.mark.parametrize("spent", [1, 2])
def test_a_charge_that_was_not_confirmed_may_count(spent: int) -> None:
    assert rules(*charge(1), *charge(2, confirmed=False), spent=spent) == set()


@pytest.mark.parametrize("spent", [1, None])
def test_a_lost_charge_is_found(spent: int | None) -> None:
    assert rules(*charge(1), *charge(2), spent=spent) == {"charge lost"}


def test_a_charge_that_counts_twice_is_found() -> None:
    assert rules(*charge(1), *charge(2, confirmed=False), spent=3) == {"charged twice"}


def test_what_redis_lost_may_be_missing() -> None:
    fault = {"number": 1, "kind": "failover", "pids": [], "seconds": 0.0}
    loss: list[Event] = [
        (3.0, "fault", fault),
        (4.0, "kept", {"number": 1, "until": 0}),
        (5.0, "fault_over", {"number": 1}),
    ]
    assert rules(*charge(1), *charge(2), *loss, spent=0) == set()
    assert rules(*charge(1), *loss, *charge(6), *charge(7), spent=1) == {"charge lost"}
