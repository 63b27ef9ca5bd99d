"""Questions over HTTP: lists, answers, answers by token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role
from pydantic import BaseModel

from tests.support.workers import work_off

from .conftest import ClientOf

pytestmark = pytest.mark.integration

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


class Approval(BaseModel):
    approved: bool
    note: str = ""


Ask = Callable[..., Awaitable[str]]


@pytest.fixture
def ask(app: App) -> Ask:
    """Enqueue a task that asks for an approval and then for an amount, and return its id when it waits."""

    @app.task
    async def pay(ctx: Context, order: int) -> Any:
        shown = {"tool": "charge", "arguments": {"order": order, "amount": 900}}
        answer = await ctx.wait_for(
            "approval", Approval, who="finance", why=f"pays {order} {HOSTILE}", shows=shown, token=f"order:{order}"
        )
        return [answer.approved, await ctx.wait_for("amount", int)]

    async def enqueue(order: int = 17) -> str:
        handle = await pay.enqueue(order)
        await work_off(app)
        return handle.id

    return enqueue


async def test_questions_are_listed_with_what_they_show(client_of: ClientOf, ask: Ask) -> None:
    task_id = await ask()
    viewer = client_of(Role.VIEWER)
    page = (await viewer.get("/questions")).json()
    [found] = page["items"]
    assert (page["next"], page["read"], page["of"]) == (None, 1, 1)
    assert (found["task_id"], found["queue"], found["task"]) == (task_id, "test", "pay")
    assert (found["wait"], found["who"], found["why"]) == ("approval", "finance", f"pays 17 {HOSTILE}")
    assert found["shown"] == {"tool": "charge", "arguments": {"order": 17, "amount": 900}}
    assert found["json_schema"]["required"] == ["approved"]
    assert (found["answered"], found["answered_by"], found["until"]) == (False, None, None)
    assert (await viewer.get(f"/questions/{task_id}")).json()["items"] == [found]
    assert (await viewer.get("/questions", params={"token": "order:17"})).json()["items"] == [found]
    assert (await viewer.get("/questions", params={"token": "order:18"})).json()["items"] == []
    assert (await viewer.get("/questions", params={"queue": "other"})).status_code == 404


async def test_a_question_names_a_task_whose_name_is_in_its_envelope_only(
    client_of: ClientOf, app: App, ask: Ask
) -> None:
    await app.producer.enqueue("pay", {"order": 17}, queue="test", headers={"enqueued-by": "shop"})
    await work_off(app)
    [found] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert found["task"] == "pay"


async def test_the_list_has_pages(client_of: ClientOf, ask: Ask) -> None:
    ids = [await ask(order) for order in range(3)]
    viewer, found, cursor = client_of(Role.VIEWER), list[str](), dict[str, str]()
    while True:
        page = (await viewer.get("/questions", params={"limit": 2, **cursor})).json()
        found += [item["task_id"] for item in page["items"]]
        assert page["of"] == 3
        if page["next"] is None:
            break
        cursor["cursor"] = page["next"]
    assert found == ids
    assert (await viewer.get("/questions", params={"cursor": "x"})).status_code == 422


async def test_an_answer_reaches_the_task_with_the_name_of_the_user(
    client_of: ClientOf, app: App, ask: Ask, log: list[str]
) -> None:
    task_id = await ask()
    approver = client_of(Role.APPROVER, name="eve")
    [question] = (await approver.get("/questions")).json()["items"]
    given = {"wait": "approval", "value": {"approved": True}, "question": question["question"]}
    answer = await approver.post(f"/questions/{task_id}/answer", json=given)
    assert answer.json() == {"task_id": task_id, "wait": "approval", "state": "waiting", "early": False, "by": "eve"}
    assert f"eve: answer question {task_id} (wait=approval): done\n" in log
    [question] = (await approver.get("/questions")).json()["items"]
    assert (question["answered"], question["answered_by"]) == (True, "eve")
    await work_off(app)
    assert (await approver.post(f"/questions/{task_id}/answer", json={"wait": "amount", "value": 3})).status_code == 200
    await work_off(app)
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert await handle.result() == [True, 3]
    [by] = {event.data["by"] async for event in handle.events() if event.type == "answered"}
    assert by == "eve"


async def test_a_second_answer_has_no_effect_and_names_who_answered(client_of: ClientOf, app: App, ask: Ask) -> None:
    task_id = await ask()
    path, first = f"/questions/{task_id}/answer", {"wait": "approval", "value": {"approved": True}}
    assert (await client_of(Role.APPROVER, name="eve").post(path, json=first)).status_code == 200
    second = {"wait": "approval", "value": {"approved": False}}
    for _ in ("stored", "read by the task"):
        refused = await client_of(Role.APPROVER, name="bob").post(path, json=second)
        assert refused.status_code == 409
        assert refused.json()["type"] == "urn:perdure:problem:already-answered"
        assert refused.json()["detail"].startswith(f"'eve' has answered wait 'approval' of task {task_id} at 20")
        await work_off(app)
    await client_of(Role.APPROVER).post(path, json={"wait": "amount", "value": 1})
    await work_off(app)
    refused = await client_of(Role.APPROVER, name="bob").post(path, json=second)
    assert "'eve' has answered" in refused.json()["detail"], "the task has ended"
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert await handle.result() == [True, 1]


async def test_of_many_answers_at_once_one_is_stored(client_of: ClientOf, app: App, ask: Ask) -> None:
    task_id = await ask()

    async def answer(number: int) -> httpx.Response:
        given = {"wait": "approval", "value": {"approved": True, "note": str(number)}}
        return await client_of(Role.APPROVER, name=f"user-{number}").post(f"/questions/{task_id}/answer", json=given)

    answers = await asyncio.gather(*map(answer, range(8)))
    [stored] = [found.json() for found in answers if found.status_code == 200]
    refused = [found for found in answers if found.status_code == 409]
    assert len(refused) == 7
    assert all(f"'{stored['by']}' has answered" in found.json()["detail"] for found in refused)
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert question["answered_by"] == stored["by"]


async def test_an_answer_with_the_same_id_is_stored_once(client_of: ClientOf, ask: Ask) -> None:
    task_id = await ask()
    given = {"wait": "approval", "value": {"approved": True}, "answer_id": "click"}
    for _ in range(2):
        assert (await client_of(Role.APPROVER).post(f"/questions/{task_id}/answer", json=given)).status_code == 200


async def test_an_answer_is_for_the_question_that_was_read(client_of: ClientOf, ask: Ask) -> None:
    task_id = await ask()
    for changed in ({"question": "0" * 32}, {"shows": "0" * 32}):
        given = {"wait": "approval", "value": {"approved": True}, **changed}
        refused = await client_of(Role.APPROVER).post(f"/questions/{task_id}/answer", json=given)
        assert refused.status_code == 409
        assert "than what this answer is for" in refused.json()["detail"]
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert not question["answered"]


async def test_an_unfit_answer_names_its_fields(client_of: ClientOf, ask: Ask) -> None:
    task_id = await ask()
    given = {"wait": "approval", "value": {"approved": "perhaps"}}
    refused = await client_of(Role.APPROVER).post(f"/questions/{task_id}/answer", json=given)
    assert refused.status_code == 422
    [field] = refused.json()["errors"]
    assert (field["where"], field["message"]) == ("value.approved", 'the value is not of type "boolean"')


async def test_an_answer_by_token_needs_no_task_id(client_of: ClientOf, app: App, ask: Ask) -> None:
    task_id = await ask()
    approver = client_of(Role.APPROVER)
    answer = await approver.post("/answers", json={"token": "order:17", "value": {"approved": True}})
    assert (answer.status_code, answer.json()["task_id"]) == (200, task_id)
    again = await approver.post("/answers", json={"token": "order:17", "value": {"approved": False}})
    assert (again.status_code, "'ada' has answered" in again.json()["detail"]) == (409, True)
    await work_off(app)
    unknown = await approver.post("/answers", json={"token": "order:17", "value": {"approved": False}})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:perdure:problem:wait-not-found")


async def test_an_early_answer_is_kept_and_listed(client_of: ClientOf, ask: Ask) -> None:
    task_id = await ask()
    early = await client_of(Role.APPROVER).post(f"/questions/{task_id}/answer", json={"wait": "amount", "value": 7})
    assert early.json()["early"] is True
    [kept] = (await client_of(Role.VIEWER).get(f"/questions/{task_id}")).json()["early"]
    assert (kept["name"], kept["by"], kept["value"]) == ("amount", "ada", 7)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.PRODUCER])
async def test_only_an_approver_answers(client_of: ClientOf, ask: Ask, role: Role) -> None:
    task_id = await ask()
    client = client_of(role)
    for path, given in (
        (f"/questions/{task_id}/answer", {"wait": "approval", "value": {"approved": True}}),
        ("/answers", {"token": "order:17", "value": {"approved": True}}),
        (f"/questions/{task_id}/links", {"wait": "approval", "person": "ada"}),
    ):
        assert (await client.post(path, json=given)).status_code == 403


async def test_mistakes_are_problems(api: httpx.AsyncClient, ask: Ask) -> None:
    task_id = await ask()
    for given, status in (
        ({"wait": "pay out", "value": 1}, 422),
        ({"wait": "approval#7", "value": 1}, 404),
        ({"wait": "approval"}, 422),
        ({"wait": "approval", "value": {"approved": True}, "by": "eve"}, 422),
    ):
        assert (await api.post(f"/questions/{task_id}/answer", json=given)).status_code == status, given
    assert (await api.post("/questions/none/answer", json={"wait": "a", "value": 1})).status_code == 404
