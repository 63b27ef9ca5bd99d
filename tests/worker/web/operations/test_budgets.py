"""Budgets by HTTP: what was spent, raises and resets, and two people who raise the same one."""

from __future__ import annotations

import httpx
import pytest
from perdure import App
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse
from perdure.web import Role

from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration

LEDGER = "tenant:00112233445566ff"
USE = BudgetUse(LEDGER, "tenant", {"usd": 5_000_000_000, "steps": 10}, label="acme")


@pytest.fixture(autouse=True)
async def charged(app: App) -> None:
    """A budget of 5 dollars and 10 steps, of which 2 dollars were spent."""
    await BudgetStore(app.producer.gateway, app.producer.namespace).charge([USE], "a", {"usd": 2_000_000_000})


async def test_budgets_are_listed_and_shown(client_of: ClientOf) -> None:
    viewer = client_of(Role.VIEWER)
    (listed,) = (await viewer.get("/budgets")).json()["items"]
    assert (listed["ledger"], listed["name"], listed["key"]) == (LEDGER, "tenant", "acme")
    assert (listed["spent"]["usd"], listed["limits"]) == (2, {"usd": 5, "steps": 10})
    assert listed["texts"]["usd"] == "$2.00 of $5.00 (40%)"
    assert (await viewer.get("/budgets/tenant")).json() == listed, "by name, as it has one key"
    assert (await viewer.get("/budgets", params={"name": "other"})).json()["items"] == []


async def test_a_raise_and_a_reset_name_who_made_them(client_of: ClientOf, log: list[str]) -> None:
    bob = client_of(Role.OPERATOR, name="bob")
    raised = (await bob.post(f"/budgets/{LEDGER}/raise", json={"usd": "$1.50", "steps": 5})).json()
    assert (raised["limits"], raised["raised"], raised["raised_by"]) == (
        {"usd": 6.5, "steps": 15},
        {"usd": 1.5, "steps": 5},
        "bob",
    )
    reset = (await bob.post(f"/budgets/{LEDGER}/reset")).json()
    assert (reset["spent"], reset["total"]["usd"], reset["raised"]) == ({}, 2, {})
    assert f"bob: raise budget {LEDGER}: done\n" in log


async def test_a_raise_that_names_its_revision_is_made_once(client_of: ClientOf) -> None:
    ada, bob = client_of(Role.OPERATOR, name="ada"), client_of(Role.OPERATOR, name="bob")
    revision = (await ada.get(f"/budgets/{LEDGER}")).json()["revision"]
    first = await ada.post(f"/budgets/{LEDGER}/raise", json={"usd": 1, "revision": revision})
    assert first.status_code == 200
    for path, body in (("raise", {"usd": 1}), ("reset", {})):
        second = await bob.post(f"/budgets/{LEDGER}/{path}", json=body | {"revision": revision})
        assert second.status_code == 409
        assert "it was raised or reset since you have read it by ada" in second.json()["detail"]
    assert (await bob.get(f"/budgets/{LEDGER}")).json()["limits"]["usd"] == 6


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ({}, "tokens", "give what to add"),
        ({"usd": "much"}, "usd", "must be a number of dollars"),
        ({"usd": -1}, "usd", "must be"),
        ({"usd": 1e30}, "usd", "must be"),
        ({"steps": 0}, "steps", "must be"),
        ({"tokens": 5}, "tokens", "does not limit tokens; it limits usd, steps"),
    ],
)
async def test_a_bad_amount_is_shown_beside_its_field(
    api: httpx.AsyncClient, body: dict[str, object], where: str, message: str
) -> None:
    answer = await api.post(f"/budgets/{LEDGER}/raise", json=body)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["where"] == where
    assert message in error["message"]
    assert (await api.get(f"/budgets/{LEDGER}")).json()["raised"] == {}


async def test_an_unknown_budget_is_named(api: httpx.AsyncClient) -> None:
    answer = await api.get("/budgets/tenand")
    assert answer.status_code == 404
    assert answer.json()["detail"].endswith("; did you mean 'tenant'?")


async def test_a_viewer_changes_nothing(client_of: ClientOf) -> None:
    for path in ("raise", "reset"):
        assert (await client_of(Role.VIEWER).post(f"/budgets/{LEDGER}/{path}", json={})).status_code == 403


@pytest.mark.parametrize("field", ["spent_usd", "limit_usd", "raised_usd", "by", "label", "at", "number", "ends"])
async def test_foreign_bytes_hide_no_budget(app: App, api: httpx.AsyncClient, field: str) -> None:
    for value in (b"\xff\x00", b"0", b"99999999999999999999999"):
        await app.producer.gateway.command("HSET", app.producer.namespace.ledger(LEDGER).ledger, field, value)
        for path in ("/budgets", f"/budgets/{LEDGER}"):
            answer = await api.get(path)
            assert answer.status_code == 200, answer.text
