"""Requests: who may do what, inputs, bodies, problems, and audit lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.queues import ConfigurationError
from perdure.web import Role, router
from perdure.worker.web import binding, service
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.support.workers import bounded

from .conftest import SECRET, ClientOf, user_of
from .streaming_client import stream_client

pytestmark = pytest.mark.integration


@pytest.fixture
async def task_id(app: App) -> str:
    @app.task
    async def work(ctx: Context) -> None: ...

    return (await work.enqueue()).id


async def test_a_request_needs_a_token(client_of: ClientOf, task_id: str) -> None:
    answer = await client_of().get(f"/tasks/{task_id}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["source"] == "request"


async def test_a_role_is_needed_and_the_attempt_is_logged(client_of: ClientOf, task_id: str, log: list[str]) -> None:
    answer = await client_of(Role.VIEWER).post(f"/tasks/{task_id}/cancel")
    assert answer.status_code == 403
    assert answer.json()["detail"] == "user 'ada' must have the role operator or producer to cancel task"
    assert f"ada: cancel task {task_id}: not allowed\n" in log


async def test_a_change_leaves_an_audit_line(client_of: ClientOf, task_id: str, log: list[str]) -> None:
    answer = await client_of(Role.OPERATOR, name="bob").post(f"/tasks/{task_id}/cancel")
    assert answer.json()["state"] == "cancelled"
    assert f"bob: cancel task {task_id}: done\n" in log


async def test_an_audit_line_says_what_an_act_selects_but_no_data_of_tasks(
    client_of: ClientOf, task_id: str, log: list[str]
) -> None:
    bob = client_of(Role.OPERATOR, name="bob")
    body = {"task": "work", "where": ["code=1234"], "name": "all", "why": f"too old\nada: {'x' * 500}"}
    assert (await bob.post("/dead-letters/purge", json=body)).status_code == 202
    assert (await bob.post(f"/tasks/{task_id}/messages", json={"content": "the code is 1234"})).status_code == 201
    [purge, message] = [line for line in log if line.startswith("bob: ")]
    assert purge.startswith("bob: purge dead letters (task=work, name=all, why=too old\\nada: xxx")
    assert purge.endswith("x): done\n")
    assert len(purge) < 300
    assert message == f"bob: send message {task_id}: done\n"
    assert not any("1234" in line for line in log)


async def test_a_refused_change_leaves_an_audit_line(client_of: ClientOf, app: App, log: list[str]) -> None:
    assert (await client_of(Role.OPERATOR).post("/tasks/unknown/cancel")).status_code == 404
    assert any(line.startswith("ada: cancel task unknown: refused: could not find task") for line in log)


async def test_a_change_that_fails_unexpectedly_leaves_an_audit_line(
    client_of: ClientOf, task_id: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.queues.handle import TaskHandle

    async def fail(_: TaskHandle[Any]) -> None:
        raise LookupError("the secret of the database")

    monkeypatch.setattr(TaskHandle, "cancel", fail)
    assert (await client_of(Role.OPERATOR).post(f"/tasks/{task_id}/cancel")).status_code == 500
    assert f"ada: cancel task {task_id}: failed: LookupError\n" in log


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"authorization": "Basic YWRhOnB3", "sec-fetch-site": "cross-site"},
    ],
    ids=str,
)
async def test_a_page_of_another_origin_changes_nothing_with_the_session_of_a_user(
    api: httpx.AsyncClient, task_id: str, headers: dict[str, str]
) -> None:
    for path in (f"/tasks/{task_id}/cancel", "/tasks/cancel", "/dead-letters/purge"):
        answer = await api.post(path, headers=headers | {"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:perdure:problem:foreign-origin")
    assert (await api.get(f"/tasks/{task_id}", headers=headers)).json()["state"] == "queued"
    assert (await api.get("/jobs")).json()["items"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "same-origin"},
        {"origin": "http://api.test"},
        {"authorization": "Bearer of-the-application", "sec-fetch-site": "cross-site"},
    ],
    ids=str,
)
async def test_a_page_of_the_same_origin_and_a_caller_with_a_token_change_tasks(
    api: httpx.AsyncClient, task_id: str, headers: dict[str, str]
) -> None:
    assert (await api.post(f"/tasks/{task_id}/cancel", headers=headers)).status_code == 200


async def test_a_producer_sees_no_task_of_another(client_of: ClientOf, task_id: str) -> None:
    for path, method in ((f"/tasks/{task_id}", "GET"), (f"/tasks/{task_id}/cancel", "POST")):
        answer = await client_of(Role.PRODUCER).request(method, path)
        assert answer.status_code == 404, "as if there were none"


async def test_an_unknown_query_parameter_is_refused(api: httpx.AsyncClient, task_id: str) -> None:
    answer = await api.get(f"/tasks/{task_id}", params={"queu": "test"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "query parameter 'queu' is unknown; known: queue"


async def test_other_paths_and_methods_are_problems(api: httpx.AsyncClient) -> None:
    answer = await api.get("/nowhere")
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no /nowhere; see openapi.json")
    answer = await api.put("/openapi.json")
    assert (answer.status_code, answer.json()["type"]) == (405, "urn:perdure:problem:method")


async def test_an_unexpected_error_shows_nothing_and_is_logged(
    api: httpx.AsyncClient, task_id: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.queues.records import Record

    monkeypatch.setattr(Record, "summary", lambda _: dict[str, str]()["the secret of the database"])
    answer = await api.get(f"/tasks/{task_id}")
    assert answer.status_code == 500
    assert answer.json()["source"] == "server"
    assert "secret" not in answer.text
    assert any("the secret of the database" in line for line in log)


async def test_it_works_under_a_path_of_another_application(app: App, task_id: str) -> None:
    mounted = Starlette(routes=[Mount("/team/perdure", router(app, authenticate=user_of, secret=SECRET))])
    headers = {"x-user": "ada", "x-roles": "viewer"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(mounted), base_url="http://api.test", headers=headers
    ) as client:
        assert (await client.get(f"/team/perdure/tasks/{task_id}")).json()["id"] == task_id
        document = (await client.get("/team/perdure/openapi.json")).json()
        assert document["servers"] == [{"url": "/team/perdure"}]
        assert (await client.get("/team/perdure/x")).json()["detail"].startswith("there is no /x;")


async def test_an_app_that_is_not_open_is_named(settings: Any) -> None:
    closed = App("closed", settings=settings)
    transport = httpx.ASGITransport(router(closed, authenticate=user_of))
    headers = {"x-user": "ada", "x-roles": "viewer"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        answer = await client.get("/tasks/x")
    assert answer.status_code == 503
    assert "app 'closed' is not open: enter it in the lifespan" in answer.json()["detail"]


def test_users_are_named_once(app: App) -> None:
    with pytest.raises(ConfigurationError, match="give tokens=, a token file, or authenticate="):
        router(app)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 65536


async def test_a_body_is_read_up_to_its_bound(app: App) -> None:
    transport = httpx.ASGITransport(router(app, authenticate=user_of, max_body=1 << 20))
    headers = {"x-user": "ada", "x-roles": "admin", "content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        answer = await client.post("/tasks", content=endless())
    assert answer.status_code == 413
    assert answer.json()["detail"] == "the body must have at most 1048576 bytes"


@pytest.mark.parametrize(
    ("content", "media_type", "status", "detail"),
    [
        (b"task=x", "application/x-www-form-urlencoded", 415, "the body must be application/json, got"),
        (b'{"task": "x"}', "text/plain", 415, "the body must be application/json, got 'text/plain'"),
        (b"{", "application/json", 400, "the body must be JSON: EOF"),
        (b"[1]", "application/json", 422, "the body must be a JSON object, got list"),
        (b"[" * 100_000, "application/json", 400, "the body must be JSON: "),
        (b'{"task": NaN}', "application/json", 400, "the body must be JSON: "),
        (b"\xff", "application/json", 400, "the body must be JSON: "),
    ],
)
async def test_a_body_must_be_a_json_object(
    api: httpx.AsyncClient, content: bytes, media_type: str, status: int, detail: str
) -> None:
    answer = await api.post("/tasks", content=content, headers={"content-type": media_type})
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("headers", "read"), [({}, 8), ({"content-length": str(8 << 20)}, 8), ({"expect": "100-continue"}, 2)], ids=str
)
async def test_a_refused_body_is_read_so_that_the_client_gets_the_response(
    app: App, headers: dict[str, str], read: int
) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(8):
            sent += 1
            yield b" " * (1 << 20)

    transport = httpx.ASGITransport(router(app, authenticate=user_of, max_body=1 << 20))
    common = {"x-user": "ada", "x-roles": "admin", "content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=common) as client:
        answer = await client.post("/tasks", content=body(), headers=headers)
    assert (answer.status_code, sent) == (413, read)


async def test_a_body_must_arrive_in_time(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(binding, "_BODY_TIMEOUT", 0.01)
    transport = httpx.ASGITransport(router(app, authenticate=user_of))
    headers = {"x-user": "ada", "x-roles": "operator", "content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        answer = await bounded(client.post("/tasks", content=stuck()))
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert answer.json()["detail"] == "the body must arrive within 0.01 seconds"


async def test_open_streams_of_a_user_do_not_keep_others_out(
    app: App, task_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_REQUESTS", 2)
    api = router(app, authenticate=user_of)
    path = f"/tasks/{task_id}/events"
    async with stream_client(api, path) as first, stream_client(api, path) as second:
        await bounded(asyncio.gather(first.started.wait(), second.started.wait()))
        async with stream_client(api, path) as third, stream_client(api, path, name="bob") as other:
            assert json.loads(await third.chunk() or b"")["type"] == "urn:perdure:problem:too-many-requests"
            assert (third.status, third.headers["retry-after"]) == (429, "1")
            await bounded(other.started.wait())
            assert other.status == 200
    async with stream_client(api, path) as again:
        await bounded(again.started.wait())
        assert again.status == 200, "the others have ended"
