"""The page of an answer link: a question and a form, for a person without an account."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.queues import Unavailable
from perdure.web import Role, router
from perdure.worker.web.operation import Call
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.support.workers import work_off

from .conftest import SECRET, ClientOf, user_of

pytestmark = pytest.mark.integration

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7919*7907}}\x1b[2J\u202e"


FORM = {"sec-fetch-site": "same-origin"}


class Payment(BaseModel):
    approved: bool
    note: str = Field("", description=HOSTILE, title=HOSTILE)
    amount: int = Field(ge=1)


Ask = Callable[..., Awaitable[str]]


@pytest.fixture
def ask(app: App, client_of: ClientOf) -> Ask:
    """Enqueue a task that asks, and return the path of a link to its question."""

    @app.task
    async def pay(ctx: Context) -> Any:
        shown = {"tool": HOSTILE, "arguments": {HOSTILE: HOSTILE, "big": 2**60 + 1}}
        return (await ctx.wait_for("approval", Payment, who=HOSTILE, why=HOSTILE, shows=shown)).model_dump()

    async def enqueue() -> str:
        handle = await pay.enqueue()
        await work_off(app)
        given = {"wait": "approval", "person": "<b>carol</b>"}
        made = await client_of(Role.APPROVER, name="eve").post(f"/questions/{handle.id}/links", json=given)
        return str(made.json()["url"]).removeprefix("http://api.test")

    return enqueue


async def test_a_get_shows_the_question_and_answers_nothing(client_of: ClientOf, ask: Ask) -> None:
    path = await ask()
    await client_of().get(path)
    page = await client_of().get(path)
    assert page.status_code == 200
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-store"
    assert str(2**60 + 1) in page.text, "the exact number"
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert not question["answered"]
    assert (await client_of().head(path)).status_code in (200, 405)


async def test_text_of_a_task_is_only_text(client_of: ClientOf, ask: Ask) -> None:
    path = await ask()
    for page in (
        await client_of().get(path),
        await client_of().post(path, data={"f1": HOSTILE, "f2": HOSTILE}, headers=FORM),
    ):
        tags = set(re.findall(r"<([a-z0-9]+)", page.text))
        assert tags.isdisjoint({"script", "img", "b"})
        assert str(7919 * 7907) not in page.text
        shown = re.sub(r"<textarea.*?</textarea>|value=\"[^\"]*\"", "", page.text, flags=re.DOTALL)
        assert not {"\x1b", "\u202e"} & set(shown)
        assert "\\x1b[2J\\u202e" in page.text


async def test_a_submitted_form_answers_once(client_of: ClientOf, app: App, ask: Ask) -> None:
    path = await ask()
    form = {"f0": "true", "f1": "two\r\nlines", "f2": "9"}
    done = await client_of().post(path, data=form, headers=FORM)
    assert (done.status_code, "Your answer is stored" in done.text) == (200, True)
    assert "&lt;b&gt;carol" in done.text
    again = await client_of().post(path, data=form | {"f0": "false"}, headers=FORM)
    assert (again.status_code, "has answered wait" in again.text) == (409, True)
    assert "has answered wait" in (await client_of().get(path)).text
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert question["answered_by"] == "<b>carol</b>, by a link of eve"
    await work_off(app)
    handle = await app.producer.find(question["task_id"])
    assert handle is not None
    assert await handle.result() == {"approved": True, "note": "two\nlines", "amount": 9}


async def test_problems_are_beside_their_fields_and_nothing_is_lost(client_of: ClientOf, ask: Ask) -> None:
    path = await ask()
    page = await client_of().post(path, data={"f0": "", "f1": "my <note>", "f2": "0"}, headers=FORM)
    assert page.status_code == 422
    assert '<span class="error" id="answer-f0-error">choose one</span>' in page.text
    assert "the value does not fit" in page.text.partition('id="answer-f2-error">')[2].partition("</span>")[0]
    assert "my &lt;note&gt;" in page.text
    [question] = (await client_of(Role.VIEWER).get("/questions")).json()["items"]
    assert not question["answered"]


async def test_odd_requests_get_a_page(client_of: ClientOf, ask: Ask) -> None:
    path = await ask()
    anyone = client_of()
    for wrong in ("/answer/x", f"{path[:-4]}AAAA", f"/answer/{'x' * 5000}"):
        page = await anyone.get(wrong)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "No answer was stored" in page.text
    many = "&".join(f"x{number}=1" for number in range(10_000))
    form = FORM | {"content-type": "application/x-www-form-urlencoded"}
    assert (await anyone.post(path, content=many, headers=form)).status_code == 422
    assert (await anyone.post(path, content=b"x" * (1 << 21), headers=form)).status_code == 413
    assert (await anyone.post(path, content=b"\xff\x00%ff", headers=form)).status_code == 422
    foreign = await anyone.post(path, data={"f0": "true", "f2": "1"}, headers={"sec-fetch-site": "cross-site"})
    assert foreign.status_code == 403, "a page or a mail elsewhere cannot send the form"
    assert (await anyone.get("/answer.css")).headers["content-type"].startswith("text/css")


async def test_a_link_works_under_a_path_of_another_application(app: App, ask: Ask) -> None:
    await ask()
    mounted = Starlette(routes=[Mount("/team/perdure", router(app, authenticate=user_of, secret=SECRET))])
    transport = httpx.ASGITransport(mounted)
    headers = {"x-user": "eve", "x-roles": "approver"}
    async with httpx.AsyncClient(transport=transport, base_url="https://site.test") as client:
        [question] = (await client.get("/team/perdure/questions", headers=headers)).json()["items"]
        given = {"wait": "approval", "person": "carol"}
        links = f"/team/perdure/questions/{question['task_id']}/links"
        url = (await client.post(links, json=given, headers=headers)).json()["url"]
        assert url.startswith("https://site.test/team/perdure/answer/")
        page = await client.get(url)
        [style] = re.findall(r'href="([^"]+css)"', page.text)
        assert (await client.get(str(httpx.URL(url).join(style)))).status_code == 200
        assert (await client.post(url, data={"f0": "false", "f2": "1"}, headers=FORM)).status_code == 200


async def test_a_page_for_anyone_does_not_name_the_server(
    client_of: ClientOf, ask: Ask, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    path = await ask()

    async def away(_: Call) -> int:
        raise Unavailable("could not reach redis://db.internal:6379")

    monkeypatch.setattr(Call, "now", away)
    page = await client_of().get(path)
    assert page.status_code == 503
    assert "Redis cannot serve this now, or holds data that cannot be read: try again later." in page.text
    assert "db.internal" not in page.text
    assert any("db.internal" in line for line in log)
