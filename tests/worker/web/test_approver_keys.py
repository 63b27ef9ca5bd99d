"""Answers over HTTP where workers know approvers: the service signs for its users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from perdure import App, Context, Settings, TaskHandle
from perdure.queues.security.approvers import ApproverKey
from perdure.web import Role, router

from tests.support.workers import bounded, work_off

from .conftest import SECRET, ClientOf, user_of

pytestmark = pytest.mark.integration

ADA, EVE = ApproverKey("ada", bytes(range(32))), ApproverKey("eve", bytes(range(1, 33)))


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    """App whose task asks ada twice, of a worker that knows ada and eve."""
    lines = f"{ADA.public_line}\n{EVE.public_line}"
    app = App("test", settings=settings.model_copy(update={"approvers": lines}))

    @app.task
    async def pay(ctx: Context) -> Any:
        found = []
        for name in ("approval", "amount"):
            wait = await ctx.open_wait(name, bool, who="ada", why="Pay?", token=name)
            found.append([await wait, wait.by])
        return found

    async with app:
        yield app


@pytest.fixture
async def client_of(app: App, tmp_path: Path) -> AsyncIterator[ClientOf]:
    keys = tmp_path / "keys"
    keys.write_text(f"{ADA.private_line}\n{EVE.private_line}\n")
    keys.chmod(0o600)
    transport = httpx.ASGITransport(router(app, authenticate=user_of, secret=SECRET, approver_keys=keys))

    def make(*roles: Role, name: str = "ada") -> httpx.AsyncClient:
        headers = {"x-user": name, "x-roles": " ".join(roles)} if roles else {}
        return httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers)

    yield make
    await transport.aclose()


async def waiting(app: App) -> TaskHandle[Any]:
    handle: TaskHandle[Any] = await app.tasks["pay"].enqueue()
    await work_off(app)
    return handle


async def test_an_answer_is_signed_with_the_key_of_its_user(app: App, client_of: ClientOf) -> None:
    handle = await waiting(app)
    [question] = (await client_of(Role.VIEWER).get(f"/questions/{handle.id}")).json()["items"]
    assert question["approvers"] == ["ada"]
    answer = {"wait": "approval", "value": True, "question": question["question"]}
    stored = await client_of(Role.APPROVER).post(f"/questions/{handle.id}/answer", json=answer)
    assert (stored.status_code, stored.json()["by"]) == (200, "ada")
    await work_off(app)
    await work_off(app)
    stored = await client_of(Role.APPROVER).post("/answers", json={"token": "amount", "value": False})
    assert stored.status_code == 200
    await work_off(app)
    assert await bounded(handle.result()) == [[True, "ada"], [False, "ada"]]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("carol", "an approver must sign it"),
        ("eve", "approver 'eve' may not answer it: it needs the signature of 'ada'"),
    ],
)
async def test_a_user_without_the_key_gets_403_with_the_remedy(
    app: App, client_of: ClientOf, name: str, problem: str
) -> None:
    handle = await waiting(app)
    for path, body in ((f"/questions/{handle.id}/answer", {"wait": "approval"}), ("/answers", {"token": "approval"})):
        refused = await client_of(Role.APPROVER, name=name).post(path, json=body | {"value": True})
        assert refused.status_code == 403
        found = refused.json()
        assert found["type"].endswith("approver-needed")
        assert problem in found["detail"]
        assert "--approver-keys FILE" in found["detail"]
    assert (await handle.waits())[0].answered is False


async def test_an_answer_by_a_link_is_signed_by_who_made_it(app: App, client_of: ClientOf) -> None:
    handle = await waiting(app)
    made = await client_of(Role.APPROVER).post(
        f"/questions/{handle.id}/links", json={"wait": "approval", "person": "carol@example.com"}
    )
    stored = await client_of().post("/answer-links", json={"link": made.json()["link"], "value": True})
    assert (stored.status_code, stored.json()["by"]) == (200, "ada")
