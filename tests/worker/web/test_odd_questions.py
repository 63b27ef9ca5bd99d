"""Questions that other programs damaged, that are encrypted, that show too much, and questions about budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from perdure import App, Budget, Context, Settings
from perdure.queues import Partition, Producer, generate_key
from perdure.web import Role, router

from tests.support.workers import work_off

from .conftest import SECRET, ClientOf, user_of

pytestmark = pytest.mark.integration

JUNK = b"\xff\xfe<script>\x00 9 9 9"


@pytest.fixture
async def waiting(app: App) -> tuple[str, Partition]:
    """A task that waits for an answer, and its partition."""

    @app.task
    async def pay(ctx: Context, token: str | None = None) -> Any:
        return await ctx.wait_for("approval", bool, why="pays", token=token)

    handle = await pay.enqueue("order:17")
    await work_off(app)
    return handle.id, handle.partition


async def test_foreign_bytes_hide_no_other_question(
    client_of: ClientOf, app: App, waiting: tuple[str, Partition]
) -> None:
    task_id, partition = waiting
    command = app.producer.gateway.command
    handles = [await app.producer.enqueue("pay", queue="test") for _ in range(2)]
    await work_off(app)
    damaged, other = (handle.id for handle in handles)
    await command("HSET", partition.inbox(other), "w:odd", JUNK, "e:odd", JUNK)
    await command("HSET", partition.inbox(damaged), b"w:\xff junk", JUNK)
    await command("ZADD", partition.waiting, "-inf", JUNK, "+inf", b"\xff", 5, "no-such-task")
    viewer = client_of(Role.VIEWER)
    page = await viewer.get("/questions")
    assert page.status_code == 200
    found = {(item["task_id"], item["wait"]): item["problem"] for item in page.json()["items"]}
    assert found.pop((task_id, "approval")) is None
    assert found.pop((other, "approval")) is None
    assert found.pop((other, "odd")).startswith("could not decode the wait")
    assert found.pop((damaged, "?")).startswith(f"could not read {partition.inbox(damaged)}")
    assert found == {}
    early = (await viewer.get(f"/questions/{other}")).json()["early"]
    assert [one["problem"] is None for one in early] == [False]
    broken = await viewer.get(f"/questions/{damaged}")
    assert (broken.status_code, broken.json()["source"]) == (500, "redis")
    refused = await client_of(Role.APPROVER).post(f"/questions/{other}/answer", json={"wait": "odd#1", "value": True})
    assert refused.status_code == 409
    await command("DEL", partition.waiting)
    for handle in handles:
        await command("DEL", partition.inbox(handle.id))


async def test_a_foreign_token_finds_nothing(client_of: ClientOf, app: App, waiting: tuple[str, Partition]) -> None:
    key = app.producer.namespace.token("order:17").key
    await app.producer.gateway.command("SET", key, JUNK, "EX", 60)
    assert (await client_of(Role.VIEWER).get("/questions", params={"token": "order:17"})).json()["items"] == []
    answer = await client_of(Role.APPROVER).post("/answers", json={"token": "order:17", "value": True})
    assert answer.status_code == 404


async def test_an_encrypted_question_is_listed_without_its_content(settings: Settings, tmp_path: Path) -> None:
    """The API has no key, so it cannot say what is asked, and answers nothing."""
    key = tmp_path / "key"
    key.write_text(generate_key())
    key.chmod(0o600)
    sealed = App("test", settings=settings.model_copy(update={"encryption_key_file": key}))

    @sealed.task
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", bool, why="a private reason", shows="a private call")

    async with sealed, Producer(address=settings.address, namespace=settings.namespace) as producer:
        handle = await pay.enqueue()
        await work_off(sealed)
        transport = httpx.ASGITransport(router(producer, authenticate=user_of, secret=SECRET))
        headers = {"x-user": "eve", "x-roles": "approver"}
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
            listed = await client.get("/questions")
            [question] = listed.json()["items"]
            assert (question["wait"], question["why"], question["shown"]) == ("approval", "", None)
            assert "key" in question["problem"]
            assert "private" not in listed.text
            given = {"wait": "approval", "value": True}
            refused = await client.post(f"/questions/{handle.id}/answer", json=given)
            assert refused.status_code == 409
            refused = await client.post(f"/questions/{handle.id}/links", json={"wait": "approval", "person": "carol"})
            assert (refused.status_code, "cannot be read" in refused.json()["detail"]) == (409, True)


async def test_what_is_too_large_to_be_shown_is_still_part_of_the_question(client_of: ClientOf, app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", bool, shows="x" * 300_000, why="y" * 500_000)

    handle = await pay.enqueue()
    await work_off(app)
    approver = client_of(Role.APPROVER)
    [question] = (await approver.get("/questions")).json()["items"]
    assert (question["shown"], len(question["why"])) == (None, 500_000)
    assert question["shows"] is not None
    given = {"wait": "approval", "person": "carol"}
    link = (await approver.post(f"/questions/{handle.id}/links", json=given)).json()["url"]
    page = await client_of().get(link)
    assert "too large to be shown here" in page.text
    assert len(page.text) < 20_000


async def test_an_answer_that_is_too_large_is_refused(
    client_of: ClientOf, app: App, waiting: tuple[str, Partition]
) -> None:
    task_id, _ = waiting
    path, approver = f"/questions/{task_id}/answer", client_of(Role.APPROVER)
    large = await approver.post(path, json={"wait": "approval", "value": "x" * (3 << 20)})
    assert (large.status_code, large.json()["source"]) == (413, "request")
    larger = await approver.post(path, json={"wait": "approval", "value": "x" * (5 << 20)})
    assert (larger.status_code, larger.json()["type"]) == (413, "urn:perdure:problem:body-too-large")
    [question] = (await approver.get("/questions")).json()["items"]
    assert not question["answered"]


async def test_a_used_up_budget_is_a_question(client_of: ClientOf, app: App) -> None:
    @app.task(budget=Budget(tokens=10, then="ask"))
    async def think(ctx: Context) -> str:
        await ctx.spend(tokens=12)
        await ctx.step("next", str, "x")
        return "done"

    handle = await think.enqueue()
    await work_off(app)
    approver = client_of(Role.APPROVER)
    [question] = (await approver.get("/questions")).json()["items"]
    assert (question["name"], question["who"]) == ("budget", "operator")
    assert question["shown"]["used"]
    path, given = f"/questions/{handle.id}/answer", {"wait": question["wait"], "question": question["question"]}
    assert (await approver.post(path, json={**given, "value": {"tokens": -1}})).status_code == 422
    assert (await approver.post(path, json={**given, "value": {"tokens": 100}})).status_code == 200
    await work_off(app)
    assert await handle.result() == "done"
