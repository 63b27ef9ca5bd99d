"""Limits by HTTP: holders and waiters, changes, and two people who change the same limit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from perdure import App, Context
from perdure.web import Role

from tests.support.workers import bounded, running_worker
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration


@pytest.fixture
async def holder(app: App) -> AsyncIterator[str]:
    """A worker whose task holds the limit `openai`, for which a second task waits; the id of the first."""
    openai = app.limit("openai", total=1)
    started, end = anyio.Event(), anyio.Event()

    @app.task(limits=[openai])
    async def call(ctx: Context) -> None:
        started.set()
        await end.wait()

    first = await call.enqueue()
    async with running_worker(app):
        await bounded(started.wait())
        await call.enqueue()
        yield first.id
        end.set()


async def test_a_limit_shows_what_holds_it_and_what_waits(holder: str, client_of: ClientOf) -> None:
    viewer = client_of(Role.VIEWER)
    (listed,) = (await viewer.get("/limits")).json()["items"]
    assert (listed["name"], listed["total"], listed["in_use"], listed["waiting"]) == ("openai", 1, 1, 1)
    shown = (await viewer.get("/limits/openai")).json()
    assert [row["task_id"] for row in shown["holders"]] == [holder]
    assert [row["tasks"] for row in shown["waiting"]] == [1]
    assert shown["limit"]["revision"] == 0


async def test_a_change_names_who_made_it_and_why(holder: str, client_of: ClientOf, log: list[str]) -> None:
    body = {"settings": {"total": 2, "rate": "100/m"}, "why": "a 429 each minute"}
    answer = await client_of(Role.OPERATOR, name="bob").patch("/limits/openai", json=body)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["limit"]["total"], shown["limit"]["rate"], shown["limit"]["revision"]) == (2, "100/m", 1)
    change = shown["changes"][0]
    assert (change["by"], change["what"], change["why"]) == ("bob", "set total=2 rate=100/m", "a 429 each minute")
    assert "bob: set limit openai (settings={'total': 2, 'rate': '100/m'}, why=a 429 each minute): done\n" in log


async def test_the_second_of_two_changes_is_refused_and_nothing_is_lost(holder: str, client_of: ClientOf) -> None:
    ada, bob = client_of(Role.OPERATOR, name="ada"), client_of(Role.OPERATOR, name="bob")
    revision = (await ada.get("/limits/openai")).json()["limit"]["revision"]
    first = await ada.patch("/limits/openai", json={"settings": {"total": 3}, "revision": revision})
    assert first.status_code == 200
    second = await bob.patch("/limits/openai", json={"settings": {"total": 9}, "revision": revision})
    assert second.status_code == 409
    assert second.json()["type"] == "urn:perdure:problem:changed-meanwhile"
    assert "it was changed since you have read it: ada: set total=3" in second.json()["detail"]
    stored = (await bob.get("/limits/openai")).json()
    assert stored["limit"]["total"] == 3
    again = {"settings": {"total": 9}, "revision": stored["limit"]["revision"]}
    assert (await bob.patch("/limits/openai", json=again)).json()["limit"]["total"] == 9
    reset = await ada.post("/limits/openai/reset", json={"revision": revision})
    assert reset.status_code == 409
    assert (await ada.post("/limits/openai/reset")).json()["limit"]["total"] == 1


async def test_a_hold_lasts_until_its_release(holder: str, client_of: ClientOf) -> None:
    operator = client_of(Role.OPERATOR, name="ada")
    held = (await operator.post("/limits/openai/hold", json={"seconds": "10m", "why": "maintenance"})).json()
    assert held["limit"]["state"].startswith("held ")
    assert held["limit"]["held_until"] is not None
    released = (await operator.post("/limits/openai/release")).json()
    assert released["limit"]["held_until"] is None
    assert [(row["by"], row["what"]) for row in released["changes"]] == [("ada", "release"), ("ada", "hold for 10 min")]


async def test_one_holder_is_released(holder: str, client_of: ClientOf) -> None:
    operator = client_of(Role.OPERATOR)
    released = await operator.post(f"/limits/openai/holders/{holder}/release", json={"why": "frozen"})
    assert released.status_code == 200, released.text
    assert released.json()["changes"][0]["what"] == f"release 1 token of task {holder}"
    missing = await operator.post("/limits/openai/holders/nobody/release")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:perdure:problem:holder-not-found")


@pytest.mark.parametrize(
    ("given", "where", "message"),
    [
        ({"runing": 3}, "settings.runing", "must be one of total, running"),
        ({"running": "many"}, "settings.running", "must be a whole number from 0 to"),
        ({"rate": "fast"}, "settings.rate", "must be"),
        ({"burst": 5}, "settings", "burst of limit 'openai' must go with a rate: set rate as well"),
        ({"errors": 7}, "settings.errors", "must be a share"),
    ],
)
async def test_a_bad_setting_is_named_and_nothing_is_stored(
    holder: str, api: httpx.AsyncClient, given: dict[str, object], where: str, message: str
) -> None:
    answer = await api.patch("/limits/openai", json={"settings": given})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["where"] == where
    assert message in error["message"]
    assert (await api.get("/limits/openai")).json()["limit"]["revision"] == 0


async def test_an_unknown_limit_is_named(holder: str, api: httpx.AsyncClient) -> None:
    for method, path, body in (
        ("GET", "/limits/opanai", None),
        ("PATCH", "/limits/opanai", {"settings": {"total": 1}}),
        ("POST", "/limits/opanai/hold", {"seconds": 5}),
    ):
        answer = await api.request(method, path, json=body)
        assert answer.status_code == 404
        assert answer.json()["detail"].endswith("; did you mean 'openai'?")


@pytest.mark.parametrize("seconds", [0, -1, "soon", "9999999d", 1e300])
async def test_a_hold_has_a_length(holder: str, api: httpx.AsyncClient, seconds: object) -> None:
    answer = await api.post("/limits/openai/hold", json={"seconds": seconds})
    assert answer.status_code == 422
    assert all(error["where"].startswith("seconds") for error in answer.json()["errors"])


async def test_a_viewer_changes_nothing(holder: str, client_of: ClientOf) -> None:
    viewer = client_of(Role.VIEWER)
    assert (await viewer.patch("/limits/openai", json={"settings": {"total": 5}})).status_code == 403
    for path in ("reset", "hold", "release", f"holders/{holder}/release"):
        answer = await viewer.post(f"/limits/openai/{path}", json={"seconds": 5} if path == "hold" else None)
        assert answer.status_code == 403
    assert (await viewer.get("/limits/openai")).json()["limit"]["total"] == 1
