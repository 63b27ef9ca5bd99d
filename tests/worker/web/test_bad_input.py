"""Bad input: large, deep and foreign data, clients that read nothing, and a Redis that goes away."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.queues.errors import Unavailable
from perdure.web import Role, router
from perdure.worker.settings import Settings
from perdure.worker.web import binding
from perdure.worker.web.operation import Call
from starlette.types import Message

from tests.support.servers import RedisServer
from tests.support.workers import bounded, redis_command, work_off

from .conftest import ClientOf, user_of
from .streaming_client import stream_client

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture
async def published(app: App) -> App:
    @app.task
    async def work(ctx: Context, data: Any = None) -> Any:
        return data

    await work_off(app)
    return app


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_100_mib_is_refused_early_and_not_kept(app: App, declared: bool) -> None:
    read = 0
    chunk = b" " * 65536

    async def receive() -> Message:
        nonlocal read
        read += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": True}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"x-user", b"ada"), (b"x-roles", b"admin"), (b"content-type", b"application/json")]
    headers += [(b"content-length", b"%d" % (100 * MIB))] if declared else []
    scope = {"type": "http", "method": "POST", "path": "/tasks", "raw_path": b"/tasks", "query_string": b""}
    scope |= {"headers": headers, "scheme": "http", "server": ("api.test", 80), "root_path": "", "http_version": "1.1"}
    api = router(app, authenticate=user_of)
    tracemalloc.start()
    try:
        await bounded(api(scope, receive, send))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent[0]["status"] == 413
    assert read <= 140 * MIB, "so much is read and dropped, so that the sender gets the response"
    assert peak < 12 * MIB
    assert dict(sent[0]["headers"])[b"connection"] == b"close"


@pytest.mark.parametrize(
    ("content", "statuses"),
    [
        (b'{"task": "work", "args": {"data": "\\ud800"}}', {400, 422}),
        (b'{"task": "work", "args": {"data": %s}}' % (b"9" * 400), {201, 422}),
        (b'{"task": "work", "args": {"data": %s}}' % (b"9" * 100_000), {400}),
        (b'{"task": "work", "args": {"data": 1e999}}', {400, 422}),
        (b'{"task": "work", "args": {"data": %s1%s}}' % (b"[" * 190, b"]" * 190), {201, 400, 422}),
        (b'{"task": "work", "args": {"data": "%s"}}' % (b"x" * 2 * MIB), {201}),
        (b'{"task": "work", "args": {"data": "%s"}}' % (b"x" * 5 * MIB), {413}),
        (b'{"task": "\\u0000", "args": {}}', {422}),
        (b'{"task": "work", "tags": ["\\u202e"], "key": "\\u0000"}', {201}),
        (b'{"task": "other", "task": "work"}', {201}),
        (b'{"task": null}', {422}),
        (b'{"task": "work", "__proto__": {}}', {422}),
        (b"", {422}),
    ],
)
async def test_bodies_that_few_clients_send(
    published: App, api: httpx.AsyncClient, content: bytes, statuses: set[int]
) -> None:
    answer = await api.post("/tasks", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in statuses, answer.text
    if answer.status_code == 201:
        task_id = answer.json()["id"]
        await work_off(published)
        result = await api.get(f"/tasks/{task_id}/result")
        assert result.json()["state"] == "succeeded" if result.status_code == 200 else result.json()["source"] == "task"
        assert (await api.get(f"/tasks/{task_id}")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/tasks/%00", "/tasks/..%2f..%2fetc", "/tasks/" + "x" * 129, "/tasks/%ff", "/tasks/a%0ab", "//tasks", "/tasks/"],
)
async def test_paths_that_name_nothing(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(path)
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_foreign_bytes_in_a_record_are_a_problem_and_hide_no_other_task(
    published: App, api: httpx.AsyncClient
) -> None:
    made = [
        (await api.post("/tasks", json={"task": "work", "args": {"data": number}})).json()["id"] for number in (1, 2)
    ]
    record = published.producer.namespace.partition("test").record(made[0])
    await redis_command(published, "HSET", record, "at", b"\xff\x00", "attempts", "many", "reason", b"\xfe")
    listed = (await api.get("/tasks")).json()["items"]
    assert [item["id"] for item in listed if item["problem"]] == [made[0]]
    assert [item["id"] for item in listed if not item["problem"]] == [made[1]]
    for path in ("", "/why", "/result", "/messages", "/streams"):
        answer = await api.get(f"/tasks/{made[0]}{path}")
        assert answer.status_code in (200, 500)
        if answer.status_code == 500:
            assert answer.json()["source"] == "redis"
            assert answer.json()["type"] == "urn:perdure:problem:unreadable-record"


async def test_a_result_that_is_not_json_is_a_problem_of_redis(published: App, api: httpx.AsyncClient) -> None:
    task_id = (await api.post("/tasks", json={"task": "work"})).json()["id"]
    await work_off(published)
    await redis_command(
        published, "HSET", published.producer.namespace.partition("test").record(task_id), "result", b"\xff{"
    )
    answer = await api.get(f"/tasks/{task_id}/result")
    assert (answer.status_code, answer.json()["source"]) == (500, "redis")


async def test_a_producer_reads_no_address_of_redis(
    published: App, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("could not reach redis://db.internal:6379")

    monkeypatch.setattr(Call, "find", away)
    shown = await client_of(Role.PRODUCER).get("/tasks/x")
    assert (shown.status_code, "db.internal" in shown.text) == (503, False)
    assert any("db.internal" in line for line in log)
    shown = await client_of(Role.VIEWER).get("/tasks/x")
    assert (shown.status_code, "db.internal" in shown.text) == (503, True)


@pytest.mark.parametrize("field", ["entry", "dead"])
async def test_a_damaged_place_of_a_message_hides_no_record(published: App, api: httpx.AsyncClient, field: str) -> None:
    task_id = (await api.post("/tasks", json={"task": "work"})).json()["id"]
    record = published.producer.namespace.partition("test").record(task_id)
    await redis_command(published, "HDEL", record, "entry")
    await redis_command(published, "HSET", record, field, b"\xff; no id")
    shown = await api.get(f"/tasks/{task_id}")
    assert shown.status_code == (200 if field == "dead" else 500)
    assert field == "dead" or shown.json()["type"] == "urn:perdure:problem:unreadable-record"
    [item] = (await api.get("/tasks")).json()["items"]
    assert (item["id"], bool(item["problem"])) == (task_id, field == "entry")


async def test_redis_that_goes_away_is_said_with_a_time_to_try_again(server_program: Path, namespace_name: str) -> None:
    server = RedisServer(server_program).start()
    try:
        settings = Settings(redis_url=server.url, namespace=namespace_name)
        async with App("test", settings=settings) as app:
            transport = httpx.ASGITransport(router(app, authenticate=user_of))
            headers = {"x-user": "ada", "x-roles": "admin"}
            async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
                assert (await client.get("/tasks")).status_code == 200
                server.stop()
                app.producer.gateway.patience = 0.05
                for method, path in (
                    ("GET", "/tasks"),
                    ("GET", "/tasks/x/events"),
                    ("POST", "/tasks"),
                    ("GET", "/catalog"),
                ):
                    answer = await bounded(
                        client.request(method, path, json={"task": "x"} if method == "POST" else None)
                    )
                    assert (answer.status_code, answer.json()["source"]) == (503, "redis")
                    assert answer.headers["retry-after"] == "1"
    finally:
        server.stop()


async def test_a_client_that_reads_nothing_is_closed(
    published: App, client_of: ClientOf, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_SEND_TIMEOUT", 0.05)
    monkeypatch.setattr(binding, "_PING", 0.01)
    task_id = (await client_of(Role.PRODUCER).post("/tasks", json={"task": "work", "delay": 60})).json()["id"]
    async with stream_client(router(published, authenticate=user_of), f"/tasks/{task_id}/events") as client:
        await bounded(client.served.wait())
    assert any(line.startswith(f"closed the event stream /tasks/{task_id}/events: its client has read") for line in log)


async def test_a_quiet_stream_has_comments(
    published: App, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_PING", 0.01)
    task_id = (await api.post("/tasks", json={"task": "work", "delay": 60})).json()["id"]
    async with stream_client(router(published, authenticate=user_of), f"/tasks/{task_id}/events") as client:
        assert (await client.chunk() or b"").startswith(b": ping")


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure_of_the_server(
    app: App, log: list[str]
) -> None:
    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    headers = [(b"x-user", b"ada"), (b"x-roles", b"admin"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tasks", "raw_path": b"/tasks", "query_string": b""}
    scope |= {"headers": headers, "scheme": "http", "server": ("api.test", 80), "root_path": "", "http_version": "1.1"}
    await bounded(router(app, authenticate=user_of)(scope, receive, send))
    assert not any("failed" in line for line in log)
