"""Enqueue by catalog: schemas, idempotency, full queues, batches, and tasks of other users."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role
from pydantic import SecretStr

from tests.support.workers import work_off

from .conftest import ClientOf

pytestmark = pytest.mark.integration


@pytest.fixture
async def shop(app: App) -> App:
    """The app with two tasks that its workers have published."""

    @app.task
    async def ship(ctx: Context, order: int, note: str = "") -> str:
        return f"shipped {order}"

    @app.task(max_depth=2)
    async def rare(ctx: Context, number: int) -> None: ...

    await work_off(app)
    return app


async def test_a_task_is_checked_by_its_published_schema(shop: App, client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    answer = await producer.post("/tasks", json={"task": "ship", "args": {"order": "seven"}})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:perdure:problem:catalog-error"
    assert answer.json()["detail"].startswith("task 'ship': order")
    answer = await producer.post("/tasks", json={"task": "ship", "args": {"order": 7}})
    assert answer.status_code == 201
    assert answer.json()["existed"] is False
    shown = (await producer.get(f"/tasks/{answer.json()['id']}")).json()
    assert (shown["state"], shown["args"]["order"]) == ("queued", 7)
    assert shown["headers"] == {"enqueued-by": "ada"}


async def test_a_task_that_no_worker_has_published_is_refused(shop: App, client_of: ClientOf) -> None:
    answer = await client_of(Role.PRODUCER).post("/tasks", json={"task": "shpi"})
    assert answer.status_code == 422
    assert "could not find task 'shpi': no worker has published it; did you mean 'ship'?" in answer.json()["detail"]


async def test_a_repeated_request_stores_one_task(shop: App, client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    body = {"task": "ship", "args": {"order": 7}}
    headers = {"Idempotency-Key": "order 7, first try"}
    first = (await producer.post("/tasks", json=body, headers=headers)).json()
    again = (await producer.post("/tasks", json=body, headers=headers)).json()
    assert again == first | {"existed": True}
    assert (await producer.get("/tasks")).json()["of"] == 1
    other = (await client_of(Role.PRODUCER, name="bob").post("/tasks", json=body, headers=headers)).json()
    assert other["id"] != first["id"], "keys belong to their user"
    changed = await producer.post("/tasks", json={"task": "ship", "args": {"order": 8}}, headers=headers)
    assert changed.status_code == 409
    assert "with other arguments (order)" in changed.json()["detail"]


async def test_an_id_of_another_user_is_refused_without_a_word_about_the_task(shop: App, client_of: ClientOf) -> None:
    body: dict[str, Any] = {"task": "ship", "args": {"order": 7}, "task_id": "order-7"}
    assert (await client_of(Role.PRODUCER, name="bob").post("/tasks", json=body)).status_code == 201
    for args in ({"order": 7}, {"order": 8}):
        answer = await client_of(Role.PRODUCER).post("/tasks", json=body | {"args": args})
        assert answer.status_code == 409
        assert answer.json()["detail"] == "id 'order-7' must be free, but another task has it: choose another one"
    answer = await client_of(Role.PRODUCER).post("/tasks/batch", json={"tasks": [body]})
    assert answer.json()["items"][0]["problem"]["status"] == 409


async def test_a_task_of_another_user_with_the_same_id_hides_none(shop: App, client_of: ClientOf) -> None:
    @shop.task(queue="others")
    async def pack(ctx: Context) -> None: ...

    await work_off(shop)
    ada, bob = client_of(Role.PRODUCER), client_of(Role.PRODUCER, name="bob")
    body = {"task": "ship", "args": {"order": 7}, "task_id": "order-7"}
    assert (await ada.post("/tasks", json=body)).status_code == 201
    assert (await bob.post("/tasks", json={"task": "pack", "task_id": "order-7"})).status_code == 201
    assert (await ada.get("/tasks/order-7")).json()["task"] == "ship"
    assert (await bob.get("/tasks/order-7")).json()["task"] == "pack"
    assert (await client_of(Role.PRODUCER, name="eve").get("/tasks/order-7")).status_code == 404
    assert (await client_of(Role.VIEWER).get("/tasks/order-7")).json()["type"] == "urn:perdure:problem:ambiguous-id"


async def test_a_producer_takes_no_id_that_another_task_will_have(shop: App, client_of: ClientOf) -> None:
    producer, body = client_of(Role.PRODUCER), {"task": "ship", "args": {"order": 7}}
    headers = {"Idempotency-Key": "order 7"}
    theirs = (await client_of(Role.PRODUCER, name="bob").post("/tasks", json=body, headers=headers)).json()["id"]
    for task_id in (theirs, f"{theirs}-0", "nightly-20270101T000000Z", "nightly-20270101T000000Z-abc"):
        answer = await producer.post("/tasks", json=body | {"task_id": task_id})
        assert answer.status_code == 422, task_id
        assert answer.json()["detail"].startswith("task_id must not look like the id of a scheduled task")
        answer = await producer.post("/tasks/batch", json={"tasks": [body | {"task_id": task_id}]})
        assert answer.status_code == 422, task_id
    again = {"Idempotency-Key": "order 7"}
    assert (await client_of(Role.PRODUCER, name="bob").post("/tasks", json=body, headers=again)).json()["id"] == theirs


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        ({"headers": {"enqueued-by": "bob"}}, "headers must not have 'enqueued-by', which the server sets"),
        ({"headers": {"Session": "x"}}, "headers must not have 'session', which the server sets"),
        ({"task_id": "turn-1"}, "task: task id must not start with 'turn-'"),
        ({"task_id": "a b"}, "task_id: String should match pattern"),
        ({"delay": -1}, "delay: Input should be greater than or equal to 0"),
        ({"tags": [""]}, "tags.0: String should have at least 1 character"),
        ({"priority": "urgent"}, "priority: Input should be 'high', 'normal' or 'low'"),
        ({"costs": {"openai": 1}}, "task 'ship' has no limits, got costs of openai"),
        ({"secrets": ["order"]}, "secrets: 'order' must be the name of an argument that is a text"),
        ({"secrets": ["note.x"]}, "secrets: 'note.x' must be the name of an argument that is a text"),
        ({"queue": "other"}, "queue: Extra inputs are not permitted"),
        ({"app": "other"}, "app 'other' has published no task 'ship'"),
        ({"args": [1]}, "args: Input should be a valid dictionary"),
        ({"priority": "low", "idle": True}, "task: "),
    ],
)
async def test_what_a_task_must_not_have(shop: App, client_of: ClientOf, changed: dict[str, Any], detail: str) -> None:
    body = {"task": "ship", "args": {"order": 7}} | changed
    answer = await client_of(Role.PRODUCER).post("/tasks", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(detail)
    assert (await client_of(Role.VIEWER).get("/tasks")).json()["of"] == 0


async def test_a_secret_argument_is_never_shown(shop: App, api: httpx.AsyncClient) -> None:
    body = {"task": "ship", "args": {"order": 7, "note": "the code is 1234"}, "secrets": ["note"]}
    task_id = (await api.post("/tasks", json=body)).json()["id"]
    assert "1234" not in (await api.get(f"/tasks/{task_id}")).text
    found = await api.get("/tasks", params={"where": "note=the code is 1234"})
    assert found.json()["items"] == []


async def test_a_secret_of_the_definition_is_masked_and_not_searched(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def pay(ctx: Context, card: SecretStr) -> None: ...

    await work_off(app)
    task_id = (await api.post("/tasks", json={"task": "pay", "args": {"card": "4111"}})).json()["id"]
    assert "4111" not in (await api.get(f"/tasks/{task_id}")).text + (await api.get("/tasks")).text
    answer = await api.get("/tasks", params={"where": "card=4111"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("where: argument 'card' of task 'pay' is secret")


async def test_a_full_queue_is_refused_at_once(shop: App, client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    for number in range(2):
        assert (await producer.post("/tasks", json={"task": "rare", "args": {"number": number}})).status_code == 201
    answer = await producer.post("/tasks", json={"task": "rare", "args": {"number": 2}})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_a_batch_answers_for_each_task_at_its_place(shop: App, client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    taken = {"task": "ship", "args": {"order": 1}, "task_id": "one"}
    await producer.post("/tasks", json=taken)
    tasks: list[dict[str, Any]] = [
        {"task": "rare", "args": {"number": 1}},
        taken,
        taken | {"task_id": "two", "args": {"order": 2}},
        {"task": "ship", "args": {"order": 3}, "delay": 60},
    ]
    found = (await producer.post("/tasks/batch", json={"tasks": tasks})).json()
    assert (found["stored"], found["refused"]) == (4, 0)
    assert [item["existed"] for item in found["items"]] == [False, True, False, False]
    states = [(await producer.get(f"/tasks/{item['id']}")).json()["state"] for item in found["items"]]
    assert states == ["queued", "queued", "queued", "scheduled"]
    tasks[1]["args"] = {"order": 9}
    found = (await producer.post("/tasks/batch", json={"tasks": tasks})).json()
    assert (found["stored"], found["refused"]) == (2, 2)
    problems = [item["problem"] and item["problem"]["type"] for item in found["items"]]
    assert problems == ["urn:perdure:problem:queue-full", "urn:perdure:problem:task-exists", None, None]
    assert [item["id"] is None for item in found["items"]] == [True, True, False, False]


async def test_a_batch_with_an_invalid_task_stores_nothing(shop: App, client_of: ClientOf) -> None:
    tasks: list[dict[str, Any]] = [{"task": "ship", "args": {"order": 1}}, {"task": "ship", "args": {}}]
    answer = await client_of(Role.PRODUCER).post("/tasks/batch", json={"tasks": tasks})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["where"] == "tasks.1"
    assert answer.json()["detail"].endswith("; no task was stored")
    assert (await client_of(Role.VIEWER).get("/tasks")).json()["of"] == 0


async def test_a_repeated_batch_stores_each_task_once(shop: App, client_of: ClientOf) -> None:
    producer = client_of(Role.PRODUCER)
    batch = {"tasks": [{"task": "ship", "args": {"order": number % 3}} for number in range(600)]}
    headers = {"Idempotency-Key": "import of today"}
    first = (await producer.post("/tasks/batch", json=batch, headers=headers)).json()
    again = (await producer.post("/tasks/batch", json=batch, headers=headers)).json()
    assert [item["id"] for item in again["items"]] == [item["id"] for item in first["items"]]
    assert {item["existed"] for item in again["items"]} == {True}
    assert (await producer.get("/tasks", params={"limit": 1})).json()["of"] == 600


async def test_a_batch_is_bounded(shop: App, client_of: ClientOf) -> None:
    for count in (0, 1001):
        answer = await client_of(Role.PRODUCER).post("/tasks/batch", json={"tasks": [{"task": "ship"}] * count})
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("tasks: List should have at")


async def test_the_catalog_lists_what_can_be_enqueued(shop: App, client_of: ClientOf) -> None:
    found = (await client_of(Role.PRODUCER).get("/catalog", params={"task": "ship"})).json()
    (ship,) = found["items"]
    assert (ship["queue"], ship["arguments"]["required"]) == ("test", ["order"])
    assert found["problems"] == {}
