"""Schedules by HTTP: runs with the states of their tasks, changes, pauses, and two people who change the same one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from perdure import App, Context, Every
from perdure.web import Role
from pydantic import SecretStr

from tests.support.workers import work_off
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration


@pytest.fixture
async def shop(app: App) -> AsyncIterator[App]:
    """An app whose worker has published its tasks and its schedule."""

    @app.task
    async def report(ctx: Context, days: int) -> int:
        return days

    @app.task
    async def login(ctx: Context, user: str, password: SecretStr) -> None: ...

    app.schedule("coded", report, Every(86_400), args={"days": 1})
    await work_off(app)
    yield app
    for handle in [handle async for handle in _handles(app)]:
        await handle.cancel()


async def _handles(app: App) -> AsyncIterator[Any]:
    partition = app.producer.namespace.partition(app.name)
    for task in await app.producer.gateway.command("ZRANGE", partition.timeline, 0, -1):
        if (handle := await app.producer.find(task.decode(), app.name)) is not None:
            yield handle


WEEKLY = {"name": "weekly", "task": "report", "cron": "0 6 * * MON", "tz": "Europe/Berlin", "arguments": {"days": 7}}


async def test_a_schedule_is_added_shown_edited_and_removed(shop: App, client_of: ClientOf, log: list[str]) -> None:
    ada = client_of(Role.OPERATOR)
    added = await ada.post("/schedules", json=WEEKLY)
    assert added.status_code == 201, added.text
    listed = (await client_of(Role.VIEWER).get("/schedules")).json()
    assert [(row["name"], row["owner"], row["when"]) for row in listed["items"]] == [
        ("coded", "code", "every 1 d"),
        ("weekly", "operator", "0 6 * * MON Europe/Berlin"),
    ]
    shown = (await ada.get("/schedules/weekly", params={"coming": 3})).json()
    assert shown["schedule"]["arguments"] == {"days": 7}
    assert len(shown["coming"]) == 3
    assert shown["coming"][0]["planned"] == shown["schedule"]["next"]["planned"]
    edited = (await ada.patch("/schedules/weekly", json={"every": "90s", "missed": "all"})).json()["schedule"]
    assert (edited["when"], edited["missed"], edited["edited"]) == ("every 90 s", "all", ["when", "rules"])
    assert (await ada.post("/schedules/weekly/reset")).json()["schedule"]["edited"] == []
    assert (await ada.delete("/schedules/weekly")).status_code == 204
    assert (await ada.get("/schedules/weekly")).status_code == 404
    assert "ada: remove schedule weekly: done\n" in log


async def test_a_run_by_hand_is_listed_with_the_state_of_its_task(shop: App, api: httpx.AsyncClient) -> None:
    started = await api.post("/schedules/coded/run")
    assert started.status_code == 201
    (run,) = (await api.get("/schedules/coded")).json()["schedule"]["runs"]
    assert (run["task_id"], run["how"], run["state"]) == (started.json()["id"], "by hand", "queued")
    await work_off(shop)
    (run,) = (await api.get("/schedules/coded")).json()["schedule"]["runs"]
    assert run["state"] == "succeeded"


async def test_a_pause_says_who_and_why(shop: App, client_of: ClientOf) -> None:
    bob = client_of(Role.OPERATOR, name="bob")
    paused = (await bob.post("/schedules/coded/pause", json={"why": "the database is being moved"})).json()
    assert paused["schedule"]["state"] == "paused"
    assert paused["schedule"]["paused"] == {"by": "bob", "why": "the database is being moved"}
    assert (paused["schedule"]["next"], paused["coming"]) == (None, [])
    resumed = (await bob.post("/schedules/coded/resume")).json()
    assert (resumed["schedule"]["state"], resumed["schedule"]["paused"]) == ("active", None)
    assert resumed["coming"]


async def test_the_second_of_two_changes_is_refused_and_a_firing_between_is_no_change(
    shop: App, client_of: ClientOf
) -> None:
    ada, bob = client_of(Role.OPERATOR, name="ada"), client_of(Role.OPERATOR, name="bob")
    revision = (await ada.get("/schedules/coded")).json()["schedule"]["revision"]
    await ada.post("/schedules/coded/run")
    assert (await ada.patch("/schedules/coded", json={"every": "1h", "revision": revision})).status_code == 200
    for method, path, body in (("PATCH", "", {"every": "2h"}), ("POST", "/reset", {})):
        second = await bob.request(method, f"/schedules/coded{path}", json=body | {"revision": revision})
        assert second.status_code == 409
        assert second.json()["type"] == "urn:perdure:problem:changed-meanwhile"
    stored = (await bob.get("/schedules/coded")).json()["schedule"]
    assert stored["when"] == "every 1 h"
    again = await bob.patch("/schedules/coded", json={"every": "2h", "revision": stored["revision"]})
    assert again.json()["schedule"]["when"] == "every 2 h"


async def test_secret_arguments_are_masked_and_kept_by_an_edit(shop: App, api: httpx.AsyncClient) -> None:
    body = {"name": "nightly", "task": "login", "every": 3600, "arguments": {"user": "a", "password": "hunter2"}}
    added = await api.post("/schedules", json=body)
    assert added.status_code == 201, added.text
    shown = await api.get("/schedules/nightly")
    assert "hunter2" not in added.text + shown.text + (await api.get("/schedules")).text
    masked = shown.json()["schedule"]["arguments"]
    edited = await api.patch("/schedules/nightly", json={"arguments": masked | {"user": "b"}})
    assert edited.status_code == 200, edited.text
    started = (await api.post("/schedules/nightly/run")).json()
    handle = await shop.producer.find(started["id"], shop.name)
    assert handle is not None
    arguments = (await handle.record()).args
    assert arguments is not None
    assert b"hunter2" in arguments
    assert b'"b"' in arguments


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({"cron": "every monday"}, "cron", "cron"),
        ({"tz": "Mars/Olympus"}, "tz", "time zone"),
        ({"every": 60}, "every", "give either a cron expression"),
        ({"cron": None}, "cron", "give a cron expression or an interval"),
        ({"jitter": "30d"}, "jitter", "jitter must be less than"),
        ({"name": "a b"}, "name", "schedule must be 1 to 64 letters"),
        ({"expires": "soon"}, "expires", "must be a number of seconds"),
        ({"missed": "twice"}, "missed", "'skip', 'once' or 'all'"),
        ({"arguments": [1]}, "arguments", "dictionary"),
    ],
)
async def test_a_bad_input_is_shown_beside_its_field(
    shop: App, api: httpx.AsyncClient, change: dict[str, object], where: str, message: str
) -> None:
    body = {name: value for name, value in (WEEKLY | change).items() if value is not None}
    if change == {"cron": None}:
        del body["tz"]
    answer = await api.post("/schedules", json=body)
    assert answer.status_code == 422, answer.text
    assert any(error["where"].startswith(where) and message in error["message"] for error in answer.json()["errors"]), (
        answer.text
    )
    assert [row["name"] for row in (await api.get("/schedules")).json()["items"]] == ["coded"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("GET", "/schedules/code", None, 404, "; did you mean 'coded'?"),
        ("POST", "/schedules/nothing/pause", None, 404, "there is no schedule 'nothing'"),
        ("POST", "/schedules/nothing/run", None, 404, "there is no schedule 'nothing'"),
        ("DELETE", "/schedules/coded", None, 409, "is in the code of app 'test'"),
        ("POST", "/schedules", WEEKLY | {"name": "coded"}, 409, "defines it in its code"),
        ("POST", "/schedules", WEEKLY | {"task": "repart"}, 422, "repart"),
        ("POST", "/schedules", WEEKLY | {"arguments": {"days": "many"}}, 422, "days"),
        ("PATCH", "/schedules/coded", {}, 422, "give what is to change"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    shop: App, api: httpx.AsyncClient, method: str, path: str, body: object, status: int, detail: str
) -> None:
    before = (await api.get("/schedules")).json()["items"]
    answer = await api.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert detail in answer.json()["detail"]
    after = (await api.get("/schedules")).json()["items"]
    assert [row["revision"] for row in after] == [row["revision"] for row in before]


@pytest.mark.parametrize("field", ["when", "rules", "call", "paused", "runs", "next", "last"])
@pytest.mark.parametrize("value", [b"\xff\x00", b"[]", b'{"by": {"a": 1}, "why": [2]}', b"99999999999999999999999"])
async def test_foreign_bytes_in_a_schedule_hide_no_other(
    shop: App, api: httpx.AsyncClient, field: str, value: bytes
) -> None:
    await shop.producer.gateway.command("HSET", shop.producer.namespace.schedule("coded"), field, value)
    assert (await api.post("/schedules", json=WEEKLY)).status_code == 201
    listed = await api.get("/schedules")
    assert listed.status_code == 200, listed.text
    assert [row["name"] for row in listed.json()["items"]] == ["coded", "weekly"]
    assert (await api.get("/schedules/coded")).status_code == 200


async def test_a_viewer_changes_nothing(shop: App, client_of: ClientOf) -> None:
    viewer = client_of(Role.VIEWER)
    for method, path, body in (
        ("POST", "/schedules", WEEKLY),
        ("PATCH", "/schedules/coded", {"every": 60}),
        ("DELETE", "/schedules/coded", None),
        *(("POST", f"/schedules/coded/{act}", None) for act in ("pause", "resume", "run", "reset")),
    ):
        assert (await viewer.request(method, path, json=body)).status_code == 403
