"""Pauses and junk by HTTP."""

from __future__ import annotations

import httpx
import pytest
from perdure import App, Context
from perdure.queues import Namespace
from perdure.web import Role
from pydantic import SecretStr

from tests.support.workers import bounded, redis_command, running_worker, work_off
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration


async def test_a_paused_queue_starts_nothing_until_it_is_resumed(app: App, client_of: ClientOf, log: list[str]) -> None:
    @app.task
    async def work(ctx: Context) -> str:
        return "done"

    handle = await work.enqueue()
    bob = client_of(Role.OPERATOR, name="bob")
    paused = (await bob.post("/pauses", json={"queue": app.name, "why": "their database is down"})).json()
    assert paused["stored"]
    pause = paused["pause"]
    assert (pause["queue"], pause["by"], pause["why"]) == (app.name, "bob", "their database is down")
    await work_off(app)
    assert str((await handle.record()).state) == "queued"
    assert (await bob.get(f"/queues/{app.name}")).json()["pause"] == pause
    assert (await bob.get("/overview")).json()["pauses"] == [pause]
    again = (await bob.post("/pauses", json={"queue": app.name, "why": "another reason"})).json()
    assert (again["stored"], again["pause"]) == (False, pause)
    resumed = (await bob.post(f"/pauses/{pause['id']}/resume")).json()
    assert (resumed["pause"], resumed["woken"], resumed["still"]) == (pause, 0, [])
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    second = await bob.post(f"/pauses/{pause['id']}/resume")
    assert (second.status_code, second.json()["type"]) == (404, "urn:perdure:problem:pause-not-found")
    assert f"bob: resume tasks {pause['id']}: done\n" in log


async def test_tasks_with_certain_arguments_are_paused(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def report(ctx: Context, tenant: str) -> str:
        return tenant

    await work_off(app)  # publishes the catalog
    body = {"task": "report", "where": ["tenant=acme"]}
    pause = (await api.post("/pauses", json=body)).json()["pause"]
    held, free = await report.enqueue("acme"), await report.enqueue("other")
    async with running_worker(app):
        assert await bounded(free.result()) == "other"
        while not (listed := (await api.get("/pauses")).json()["items"])[0]["parked"]:
            pass
        assert [(row["pause"], row["parked"]) for row in listed] == [(pause, 1)]
        resumed = (await api.post(f"/pauses/{pause['id']}/resume")).json()
        assert resumed["woken"] == 1
        assert await bounded(held.result()) == "acme"


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ({}, "queue", "name a queue, or tasks"),
        ({"why": "none"}, "queue", "name a queue, or tasks"),
        ({"queue": "a b"}, "queue", "must be 1 to 64 letters"),
        ({"where": ["tenant"]}, "where.0", "must be NAME=VALUE"),
        ({"where": ["a=1"] * 11}, "where", "at most 10 items"),
        ({"where": ["password=x"]}, "where", "argument 'password' of task 'login' is secret"),
    ],
)
async def test_a_bad_pause_is_shown_beside_its_field(
    app: App, api: httpx.AsyncClient, body: dict[str, object], where: str, message: str
) -> None:
    @app.task
    async def login(ctx: Context, password: SecretStr) -> None: ...

    await work_off(app)
    answer = await api.post("/pauses", json=body)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["where"] == where
    assert message in error["message"]
    assert (await api.get("/pauses")).json()["items"] == []


async def test_a_pause_of_unknown_names_is_stored_with_a_note(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    await work_off(app)
    paused = (await api.post("/pauses", json={"queue": "tests", "task": "wrk"})).json()
    assert paused["stored"]
    first, second = paused["notes"]
    assert first.startswith("there is no queue 'tests' yet")
    assert second.startswith("no worker has published a task 'wrk'")
    await api.post(f"/pauses/{paused['pause']['id']}/resume")


async def test_foreign_pauses_are_problems(app: App, api: httpx.AsyncClient) -> None:
    names: Namespace = app.producer.namespace
    await redis_command(app, "HSET", names.pauses, b"\xff", b"7 {}")
    found = (await api.get("/pauses")).json()
    assert found["items"] == []
    assert found["problems"][0]["problem"].startswith("could not read the pause")
    assert (await api.get("/overview")).status_code == 200
    await redis_command(app, "DEL", names.pauses)
    await redis_command(app, "SET", names.pauses, "of another type")
    answer = await api.get("/pauses")
    assert (answer.status_code, answer.json()["source"]) == (500, "redis")
    assert (await api.get("/overview")).status_code == 200


async def test_junk_is_listed_as_printable_text(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    await work.enqueue()
    partition = app.producer.namespace.partition(app.name)
    await redis_command(app, "ZADD", partition.due, 1, b"\xff<script>")
    await work_off(app)
    (item,) = (await api.get("/junk", params={"queue": app.name})).json()["items"]
    assert item["item"] == "'\\xff<script>'"
    assert item["reason"] == "it is not UTF-8"
    assert (await api.get("/junk")).json()["items"] == [item]
    assert (await api.get("/junk", params={"queue": "nowhere"})).status_code == 404


async def test_a_viewer_pauses_nothing(client_of: ClientOf, app: App) -> None:
    viewer = client_of(Role.VIEWER)
    assert (await viewer.post("/pauses", json={"queue": app.name})).status_code == 403
    assert (await viewer.post("/pauses/x/resume")).status_code == 403
