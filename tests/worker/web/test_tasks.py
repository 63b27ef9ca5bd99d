"""Tasks over HTTP: lists and filters, explanations, results, and messages."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role
from perdure.worker.web.router import application
from perdure.worker.web.service import Service

from tests.support.workers import bounded, redis_command, running_worker, wait_until, work_off

from .conftest import ClientOf, user_of
from .streaming_client import stream_client

pytestmark = pytest.mark.integration


@pytest.fixture
async def ids(app: App) -> list[str]:
    """Ids of five tasks, the newest first: one dead, one succeeded, one scheduled, two queued."""

    @app.task
    async def work(ctx: Context, number: int, tenant: str = "acme") -> int:
        if number == 0:
            raise ValueError("the printer is on fire")
        return number

    for number in range(2):
        await work.options(max_attempts=1).enqueue(number)
    await work_off(app)
    await work.options(delay=60, tags=["late", "big"]).enqueue(2, tenant="brick")
    await work.options(key="customer-3").enqueue(3)
    await work.enqueue(4)
    return [item["id"] for item in (await list_of(app))["items"]]


async def list_of(app: App) -> dict[str, list[dict[str, str]]]:
    transport = httpx.ASGITransport(application(Service(app, authenticate=user_of)))
    headers = {"x-user": "ada", "x-roles": "viewer"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        found: dict[str, list[dict[str, str]]] = (await client.get("/tasks")).json()
        return found


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("state=dead", [0]),
        ("state=dead&state=scheduled", [2, 0]),
        ("task=work", [4, 3, 2, 1, 0]),
        ("task=other", []),
        ("key=customer-3", [3]),
        ("tag=late&tag=big", [2]),
        ("tag=late&tag=small", []),
        ("error=PRINTER", [0]),
        ("where=number%3D3", [3]),
        ("where=tenant%3Dbrick", [2]),
        ("where=tenant%3Dbrick&where=number%3D2", [2]),
        ("since=1h", [4, 3, 2, 1, 0]),
        ("until=1h", []),
        ("since=2026-01-01T00:00Z&state=queued", [4, 3]),
        ("app=other", []),
        ("queue=test&limit=2", [4, 3]),
        ("enqueued_by=ada", []),
    ],
)
async def test_filters(ids: list[str], api: httpx.AsyncClient, query: str, found: list[int]) -> None:
    page = (await api.get(f"/tasks?{query}")).json()
    assert [item["args"]["number"] for item in page["items"]] == found
    assert page["of"] == 5
    assert page["read"] in (0, 2, 5) if "limit" in query or "until" in query else page["read"] == 5


async def test_pages_have_each_task_once(ids: list[str], api: httpx.AsyncClient) -> None:
    seen, cursor = [], None
    while True:
        page = (await api.get("/tasks", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [item["id"] for item in page["items"]]
        if (cursor := page["next"]) is None:
            break
    assert seen == ids


@pytest.mark.parametrize(
    ("query", "status", "detail"),
    [
        ("state=ded", 422, "state.0: Input should be 'queued', "),
        ("cursor=abc", 422, "cursor: cursor must be one that an earlier page"),
        ("cursor=WzFlOTk5LDEsImEiLDBd", 422, "cursor: cursor must be one that an earlier page"),
        ("state=running&cursor=Wy01LC01LCJ0ZXN0IiwwXQ", 422, "cursor: cursor must be one that an earlier page"),
        ("since=yesterday", 422, "since: must be a time before now, such as 90s"),
        ("where=number", 422, "where.0: must be NAME=VALUE"),
        ("queue=other", 404, "there is no queue 'other' in namespace"),
        ("limit=0", 422, "limit: Input should be greater than or equal to 1"),
        ("limit=1001", 422, "limit: Input should be less than or equal to 1000"),
    ],
)
async def test_filters_that_are_not_valid(
    ids: list[str], api: httpx.AsyncClient, query: str, status: int, detail: str
) -> None:
    answer = await api.get(f"/tasks?{query}")
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(detail)


async def test_a_producer_lists_its_own_tasks(ids: list[str], client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    mine = (await producer.post("/tasks", json={"task": "work", "args": {"number": 5}})).json()["id"]
    page = (await producer.get("/tasks", params={"enqueued_by": "bob"})).json()
    assert [item["id"] for item in page["items"]] == [mine]
    page = (await client_of(Role.VIEWER).get("/tasks", params={"enqueued_by": "ada"})).json()
    assert [item["id"] for item in page["items"]] == [mine]


async def test_a_failure_of_a_handler_differs_from_one_of_the_server(
    ids: list[str], api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = await api.get(f"/tasks/{ids[4]}/result")
    assert failed.status_code == 409
    problem = failed.json()
    assert (problem["source"], problem["type"]) == ("task", "urn:perdure:problem:task-failed")
    assert problem["task"] == {
        "id": ids[4],
        "state": "dead",
        "reason": "attempts_exhausted",
        "error": "ValueError",
        "message": "the printer is on fire",
    }
    monkeypatch.setattr("perdure.worker.web.operations.tasks.from_json", lambda _: dict[str, str]()["a bug"])
    broken = await api.get(f"/tasks/{ids[3]}/result")
    assert (broken.status_code, broken.json()["source"], broken.json()["task"]) == (500, "server", None)


async def test_results(ids: list[str], api: httpx.AsyncClient) -> None:
    assert (await api.get(f"/tasks/{ids[3]}/result")).json() == {
        "id": ids[3],
        "state": "succeeded",
        "ended": True,
        "result": 1,
    }
    waiting = (await api.get(f"/tasks/{ids[0]}/result", params={"wait": 0.01})).json()
    assert (waiting["state"], waiting["ended"], waiting["result"]) == ("queued", False, None)
    cancelled = (await api.post(f"/tasks/{ids[0]}/cancel")).json()
    assert cancelled["state"] == "cancelled"
    assert (await api.post(f"/tasks/{ids[0]}/cancel")).status_code == 200, "again"
    answer = await api.get(f"/tasks/{ids[0]}/result")
    assert (answer.status_code, answer.json()["source"]) == (409, "task")
    assert answer.json()["task"]["state"] == "cancelled"
    answer = await api.post(f"/tasks/{ids[3]}/cancel")
    assert answer.status_code == 409
    assert answer.json()["detail"] == f"could not cancel task {ids[3]}: it is succeeded"


async def test_a_wait_ends_with_the_task(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> float:
        return float("inf")

    handle = await work.enqueue()
    waiting = asyncio.ensure_future(api.get(f"/tasks/{handle.id}/result", params={"wait": 60}))
    await work_off(app)
    assert (await bounded(waiting)).json()["result"] == "Infinity"


async def test_a_result_of_a_chain_is_that_of_the_last_task(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def last(ctx: Context) -> str:
        return "done"

    @app.task
    async def first(ctx: Context) -> None:
        await ctx.continue_as(last)

    handle = await first.enqueue()
    await work_off(app)
    found = (await api.get(f"/tasks/{handle.id}/result")).json()
    assert found["result"] == "done"
    assert found["id"] != handle.id


async def test_a_client_that_leaves_ends_its_wait(app: App) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    listeners = app.producer.notifications._listeners

    async def waits() -> bool:
        return handle.partition.record(handle.id).encode() in listeners

    async with stream_client(application(Service(app, authenticate=user_of)), f"/tasks/{handle.id}/result?wait=60"):
        await wait_until(waits, "the request waits for the task")
    assert not await waits()


async def test_a_task_says_why_it_is_in_its_state(ids: list[str], api: httpx.AsyncClient) -> None:
    found = (await api.get(f"/tasks/{ids[0]}/why")).json()
    assert found["cause"] == "no_worker"
    assert found["state"] == "queued"
    assert found["remedy"]


async def test_a_message_is_sent_once_and_has_its_user_as_sender(app: App, client_of: ClientOf) -> None:
    @app.task
    async def work(ctx: Context) -> list[str]:
        (message,) = await ctx.inbox()
        return [message.sender, message.content]

    handle = await work.enqueue()
    operator = client_of(Role.OPERATOR, name="bob")
    path, headers = f"/tasks/{handle.id}/messages", {"Idempotency-Key": "m1"}
    first = await operator.post(path, json={"content": "yes"}, headers=headers)
    assert first.status_code == 201
    assert (await operator.post(path, json={"content": "yes"}, headers=headers)).json() == first.json()
    (message,) = (await operator.get(path)).json()["items"]
    assert (message["sender"], message["content"], message["number"]) == ("bob", "yes", first.json()["number"])
    async with running_worker(app):
        assert await handle.result(timeout=60) == ["bob", "yes"]
    answer = await operator.post(path, json={"content": "yes"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:perdure:problem:task-ended")


async def test_a_message_is_removed(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    path = f"/tasks/{handle.id}/messages"
    number = (await api.post(path, json={"content": {"a": 1}})).json()["number"]
    assert (await api.delete(f"{path}/{number}")).status_code == 204
    assert (await api.delete(f"{path}/{number}")).status_code == 404
    assert (await api.get(path)).json() == {"items": []}


async def test_an_expired_task_differs_from_an_unknown_one(app: App, ids: list[str], client_of: ClientOf) -> None:
    await redis_command(app, "DEL", app.producer.namespace.partition("test").record(ids[3]))
    viewer = client_of(Role.VIEWER)
    answer = await viewer.get(f"/tasks/{ids[3]}")
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:perdure:problem:task-expired")
    assert (await viewer.get("/tasks/unknown")).status_code == 404
    assert (await client_of(Role.PRODUCER).get(f"/tasks/{ids[3]}")).status_code == 404
