"""Answer links over HTTP: made by an approver, used once by a person without an account."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role, router

from tests.support.workers import work_off

from .conftest import ClientOf, user_of

pytestmark = pytest.mark.integration

Ask = Callable[..., Awaitable[str]]


@pytest.fixture
def ask(app: App) -> Ask:
    """Enqueue a task that asks for an approval, and return its id when it waits."""

    @app.task
    async def pay(ctx: Context, amount: int) -> Any:
        return await ctx.wait_for("approval", bool, who="finance", why="pays", shows={"amount": amount})

    async def enqueue(amount: int = 9, **options: Any) -> str:
        handle = await pay.options(**options).enqueue(amount)
        await work_off(app)
        return handle.id

    return enqueue


async def make_link(client_of: ClientOf, task_id: str, **options: Any) -> dict[str, Any]:
    given = {"wait": "approval", "person": "carol@example.com", **options}
    made = await client_of(Role.APPROVER, name="eve").post(f"/questions/{task_id}/links", json=given)
    assert made.status_code == 201, made.text
    found: dict[str, Any] = made.json()
    return found


async def test_a_link_answers_once_in_the_name_of_its_person(
    client_of: ClientOf, app: App, ask: Ask, log: list[str]
) -> None:
    task_id = await ask()
    made = await make_link(client_of, task_id)
    assert made["url"] == f"http://api.test/answer/{made['link']}"
    assert not made["link"].startswith("."), "proxies refuse such a path"
    anyone = client_of()
    shown = (await anyone.get("/answer-links", params={"link": made["link"]})).json()
    assert (shown["person"], shown["made_by"]) == ("carol@example.com", "eve")
    assert shown["question"]["shown"] == {"amount": 9}
    used = await anyone.post("/answer-links", json={"link": made["link"], "value": True})
    assert (used.status_code, used.json()["by"]) == (200, "carol@example.com, by a link of eve")
    assert any(
        f"carol@example.com has answered wait 'approval' of task {task_id} by a link of eve" in line for line in log
    )
    for _ in ("stored", "read by the task"):
        again = await anyone.post("/answer-links", json={"link": made["link"], "value": False})
        assert (again.status_code, "'carol@example.com, by a link of eve' has answered" in again.json()["detail"]) == (
            409,
            True,
        )
        assert (await anyone.get("/answer-links", params={"link": made["link"]})).status_code == 409
        await work_off(app)
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert await handle.result() is True
    assert not any(made["link"] in line for line in log), "who reads the log must not be able to answer"


async def test_a_changed_or_foreign_link_answers_nothing(client_of: ClientOf, app: App, ask: Ask) -> None:
    link = (await make_link(client_of, await ask()))["link"]
    other = httpx.AsyncClient(
        transport=httpx.ASGITransport(router(app, authenticate=user_of, secret=b"x" * 32)), base_url="http://api.test"
    )
    head, _, signature = link.rpartition(".")
    forged = [
        f"{head[:-2]}AA.{signature}",
        f"{head}.{signature[:-3]}AAA",
        head,
        "x",
        "Ä" * 4000,
        link[: len(link) // 2],
    ]
    async with other:
        for client, given in [*((client_of(), text) for text in forged), (other, link)]:
            for answer in (
                await client.get("/answer-links", params={"link": given}),
                await client.post("/answer-links", json={"link": given, "value": True}),
            ):
                assert (answer.status_code, answer.json()["type"]) == (404, "urn:perdure:problem:link-not-valid")
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert not question["answered"]


async def test_an_expired_link_says_so(client_of: ClientOf, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.worker.web.operation import Call

    link = (await make_link(client_of, await ask(), seconds=60))["link"]
    now = Call.now

    async def later(self: Call) -> int:
        return await now(self) + 61_000

    monkeypatch.setattr(Call, "now", later)
    answer = await client_of().post("/answer-links", json={"link": link, "value": True})
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:perdure:problem:link-expired")
    assert "ask eve for another" in answer.json()["detail"]


async def test_a_link_is_for_one_question(client_of: ClientOf, app: App) -> None:
    """The task shows another amount in its next attempt, so the link of the first is void."""
    shown, key = [9, 90], {"attempt": 0}

    @app.task
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", bool, shows={"amount": shown[key["attempt"]]})

    handle = await pay.enqueue()
    await work_off(app)
    link = (await make_link(client_of, handle.id))["link"]
    key["attempt"] = 1
    await handle.answer("approval", True)  # for the first amount: the next run drops it and asks again
    await work_off(app)
    for answer in (
        await client_of().get("/answer-links", params={"link": link}),
        await client_of().post("/answer-links", json={"link": link, "value": True}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:perdure:problem:question-changed")
    fresh = (await make_link(client_of, handle.id))["link"]
    assert (await client_of().post("/answer-links", json={"link": fresh, "value": True})).status_code == 200
    await work_off(app)
    assert await handle.result() is True


async def test_a_link_of_a_task_that_has_ended_says_so(client_of: ClientOf, app: App, ask: Ask) -> None:
    task_id = await ask()
    link = (await make_link(client_of, task_id))["link"]
    handle = await app.producer.find(task_id)
    assert handle is not None
    await handle.cancel()
    answer = await client_of().post("/answer-links", json={"link": link, "value": True})
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:perdure:problem:question-closed")


async def test_links_are_refused_where_they_cannot_work(client_of: ClientOf, app: App, ask: Ask) -> None:
    task_id = await ask()
    eve = client_of(Role.APPROVER, name="eve")
    path = f"/questions/{task_id}/links"
    for given, status in (
        ({"wait": "other", "person": "carol"}, 404),
        ({"wait": "approval", "person": ""}, 422),
        ({"wait": "approval", "person": "a\nb"}, 422),
        ({"wait": "approval", "person": "carol", "seconds": 1}, 422),
    ):
        assert (await eve.post(path, json=given)).status_code == status, given
    transport = httpx.ASGITransport(router(app, authenticate=user_of))
    headers = {"x-user": "eve", "x-roles": "approver"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as plain:
        refused = await plain.post(path, json={"wait": "approval", "person": "carol"})
        assert (refused.status_code, refused.json()["source"]) == (503, "server")
        assert "--secret-file" in refused.json()["detail"]
    assert (await eve.post(f"/questions/{task_id}/answer", json={"wait": "approval", "value": True})).status_code == 200
    refused = await eve.post(path, json={"wait": "approval", "person": "carol"})
    assert (refused.status_code, "'eve' has answered" in refused.json()["detail"]) == (409, True)
