"""The overview, queues and workers by HTTP."""

from __future__ import annotations

import anyio
import httpx
import pytest
from perdure import App, Context
from perdure.queues.presence import WorkerInfo, announce
from perdure.web import Role

from tests.support.workers import bounded, redis_command, running_worker
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration


async def test_the_overview_shows_queues_workers_and_running_tasks(app: App, client_of: ClientOf) -> None:
    started, end = anyio.Event(), anyio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        started.set()
        await end.wait()

    handle = await work.enqueue()
    await work.options(delay=3600).enqueue()
    async with running_worker(app, concurrency=4) as worker:
        await bounded(started.wait())
        found = (await client_of(Role.VIEWER).get("/overview")).json()
        end.set()
    assert [row["id"] for row in found["running"]] == [handle.id]
    assert found["running"][0]["worker"] == worker.id
    assert [(row["id"], row["concurrency"]) for row in found["workers"]] == [(worker.id, 4)]
    (queue,) = found["queues"]
    assert (queue["queue"], queue["in_flight"], queue["due"], queue["workers"]) == (app.name, 1, 1, 1)
    totals = found["totals"]
    assert (totals["in_flight"], totals["due"], totals["depth"], totals["dead"]) == (1, 1, 0, 0)
    assert (totals["workers"], totals["slots"]) == (1, 4)
    assert found["namespace"] == app.settings.namespace


async def test_a_producer_may_not_read_the_overview(client_of: ClientOf) -> None:
    for path in ("/overview", "/queues", "/workers"):
        assert (await client_of(Role.PRODUCER).get(path)).status_code == 403


async def test_queues_are_listed_in_pages(app: App, api: httpx.AsyncClient) -> None:
    names = ["alpha", "beta", "gamma"]
    for name in names:

        @app.task(name=f"of-{name}", queue=name)
        async def work(ctx: Context) -> None: ...

        await work.enqueue()
    seen, cursor = [], None
    while True:
        page = (await api.get("/queues", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [(queue["queue"], queue["depth"]) for queue in page["items"]]
        assert page["of"] == 3
        if (cursor := page["next"]) is None:
            break
    assert seen == [(name, 1) for name in names]
    assert (await api.get("/queues", params={"cursor": "ä"})).json()["type"] == "urn:perdure:problem:invalid-cursor"


async def test_a_queue_has_its_lanes_and_partitions(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    await work.enqueue()
    await work.options(priority="high").enqueue()
    found = (await api.get(f"/queues/{app.name}")).json()
    assert (found["depth"], found["lanes"]["high"]["depth"], found["lanes"]["normal"]["depth"]) == (2, 1, 1)
    assert sum(partition["depth"] for partition in found["partitions"]) == 2
    missing = await api.get("/queues/nowhere")
    assert missing.status_code == 404
    assert missing.json()["detail"].startswith("there is no queue 'nowhere' in namespace")


async def test_a_worker_shows_what_it_runs(app: App, api: httpx.AsyncClient) -> None:
    started, end = anyio.Event(), anyio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        started.set()
        await end.wait()

    handle = await work.enqueue()
    async with running_worker(app) as worker:
        await bounded(started.wait())
        found = (await api.get(f"/workers/{worker.id}")).json()
        listed = (await api.get("/workers")).json()
        end.set()
    assert [row["id"] for row in found["running"]] == [handle.id]
    assert found["worker"]["app"] == app.name
    assert [row["worker"]["id"] for row in listed["workers"]] == [worker.id]
    missing = await api.get("/workers/nobody")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:perdure:problem:worker-not-found")


@pytest.mark.parametrize("foreign", [b"[]", b"7", b'"text"', b'{"levels": 3, "figure": "x", "default": []}', b"null"])
async def test_a_registration_of_another_program_hides_nothing(
    app: App, api: httpx.AsyncClient, foreign: bytes
) -> None:
    namespace = app.producer.namespace
    info = WorkerInfo("odd", app.name, "host", 1, "9", (app.name,), 1, 0, 0)
    await announce(app.producer.gateway, namespace, info, 60)
    for field in ("health", "capacity", "rates"):
        await redis_command(app, "HSET", namespace.worker("odd"), field, foreign)
    for path in ("/overview", "/workers", "/queues", "/workers/odd"):
        answer = await api.get(path)
        assert answer.status_code == 200, answer.text
