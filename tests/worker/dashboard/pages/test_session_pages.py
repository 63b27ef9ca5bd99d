"""Pages of sessions: the list, a conversation, messages into it, corrections, export, removal."""

from __future__ import annotations

import re

import httpx
import orjson
import pytest_asyncio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry
from perdure.web import Role
from perdure.worker.dashboard.application import application
from perdure.worker.web.service import Service
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import running_worker, work_off
from tests.worker.dashboard.conftest import SECRET, BrowserPage, Visit, user_of
from tests.worker.dashboard.pages.test_questions_pages import hidden_fields


class Concierge(Agent[AgentState]):
    """Answers with what it was sent; fails for 'bad'."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        if state.goal == "bad":
            raise ValueError("bad message")
        return f"You wrote: {state.goal}"


@pytest_asyncio.fixture(loop_scope="session")
async def concierge(app: App) -> App:
    """The app of the test with an agent that is in the catalog."""
    app.agent(Concierge, retry=Retry(max_attempts=1))
    await work_off(app)
    return app


async def send(visit: Visit, session: str, text: str, **given: str) -> int:
    """Send a message by the page, and return the status of the response."""
    path = f"/sessions/concierge/send?session={session}"
    form = {"text": text, "message_id": text[:100]} | given
    return (await visit(path, Role.OPERATOR, form=form)).status_code


async def test_a_conversation_is_shown_and_continued(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "user/42 é")
    await session.send("Where is my parcel?", sender="carol")
    await work_off(concierge)
    listed = await visit("/sessions?agent=concierge", Role.VIEWER)
    [path] = re.findall(r'href="(/sub/sessions/concierge\?session=[^"]+)"', listed.text)
    shown = await visit(path, Role.VIEWER)
    assert shown.status_code == 200
    for text in ("carol", "Where is my parcel?", "You wrote: Where is my parcel?", "State after the last turn"):
        assert text in shown.text
    assert "/send?" not in shown.text, "a viewer is offered no message"
    form = await visit(path.replace("?", "/send?"), Role.OPERATOR)
    sent = hidden_fields(form.text) | {"text": "And today?\r\nPlease."}
    for _ in range(2):
        done = await visit(path.replace("?", "/send?"), Role.OPERATOR, form=sent, name="eve")
        assert (done.status_code, done.headers["location"]) == (303, path), "sent twice, stored once"
    running = await visit(path, Role.VIEWER)
    assert ("And today?\nPlease." in running.text, "eve" in running.text) == (True, True)
    await work_off(concierge)
    assert [message.content async for message in session.history(after=1)] == [
        "And today?\nPlease.",
        "You wrote: And today?\nPlease.",
    ]


async def test_a_long_conversation_has_pages(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "ada")
    for number in range(60):
        await session.send(f"message {number + 1}.")
    page = await visit("/sessions/concierge?session=ada", Role.VIEWER)
    assert ("message 60." in page.text, "message 36." in page.text, "message 35." in page.text) == (True, True, False)
    assert "after=10" in page.text
    first = await visit("/sessions/concierge?session=ada&after=0", Role.VIEWER)
    assert ("message 1." in first.text, "message 25." in first.text, "message 26." in first.text) == (True, True, False)
    odd = await visit("/sessions/concierge?session=ada&after=99999999999999999999999", Role.VIEWER)
    assert odd.status_code == 200


async def test_text_in_a_conversation_is_only_text(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "<script>'\"&")
    await session.send(f"[link](javascript:alert(1)) {ALL_HOSTILE}", sender=ALL_HOSTILE[:500])
    await work_off(concierge)
    listed = await visit("/sessions", Role.ADMIN)
    shown = await visit("/sessions/concierge?session=%3Cscript%3E%27%22%26", Role.ADMIN)
    for page in (listed, shown):
        assert page.status_code == 200
        assert_harmless(page.text)
    assert "javascript:" in shown.text, "shown as text"


async def test_a_session_is_corrected(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "ada")
    await session.send("one")
    await work_off(concierge)
    path = "/sessions/concierge/correct?session=ada"
    for wrong, word in (("{", "JSON"), ('{"context2": 1}', "context2"), ("[1]", "dictionary")):
        refused = await visit(path, Role.OPERATOR, form={"changes": wrong})
        assert (refused.status_code, word in refused.text) == (422, True), refused.text
    done = await visit(path, Role.OPERATOR, form={"changes": '{"context.city": "Paris"}'}, name="eve")
    assert done.status_code == 303
    shown = await visit("/sessions/concierge?session=ada", Role.VIEWER)
    assert ("By eve" in shown.text, "Paris" in shown.text) == (True, True)


async def test_a_session_is_exported(visit: Visit, concierge: App) -> None:
    await concierge.session(Concierge, "ada").send("one")
    await work_off(concierge)
    file = await visit("/sessions/concierge/export?session=ada", Role.VIEWER)
    record, *messages = [orjson.loads(line) for line in file.content.splitlines()]
    assert (record["turns"], [message["content"] for message in messages]) == (1, ["one", "You wrote: one"])
    assert "attachment" in file.headers["content-disposition"]


async def test_a_failed_turn_is_passed_over_on_demand(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "ada")
    await session.send("bad")
    await work_off(concierge)
    shown = await visit("/sessions/concierge?session=ada", Role.VIEWER)
    assert "Turn 1 is a dead letter (attempts_exhausted)" in shown.text
    assert await send(visit, "ada", "two") == 409
    assert await send(visit, "ada", "two", skip_failed="true") == 303


async def test_only_an_admin_forgets_a_session_after_a_confirmation(visit: Visit, concierge: App) -> None:
    session = concierge.session(Concierge, "ada")
    await session.send("one")
    await work_off(concierge)
    path = "/sessions/concierge/forget?session=ada"
    assert (await visit(path, Role.OPERATOR, form={})).status_code == 403
    asked = await visit(path, Role.ADMIN)
    assert "its message and the tasks of its turns" in asked.text
    assert (await session.record()).ended == 1, "nothing is deleted by a GET"
    assert (await visit(path, Role.ADMIN, form={})).headers["location"] == "/sub/sessions"
    assert (await visit(path, Role.ADMIN, form={})).status_code == 404
    assert (await visit("/sessions/concierge?session=ada", Role.VIEWER)).status_code == 404


async def test_a_head_request_does_nothing(concierge: App) -> None:
    """HEAD is allowed where GET is, and is sent without a check of its origin."""
    session = concierge.session(Concierge, "ada")
    await session.send("one")
    site = application(Service(concierge, authenticate=user_of, secret=SECRET), actions=True)
    headers = {"x-user": "ada", "x-roles": "admin"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(site), base_url="http://dashboard.test", headers=headers
    ) as client:
        assert (await client.head("/sessions/concierge/forget?session=ada")).status_code == 200
    assert (await session.record()).sent == 1


async def test_odd_addresses_are_problems(visit: Visit, concierge: App) -> None:
    for path in ("/sessions/concierge", "/sessions/concierge?session=%0A", "/sessions/concierge/send?session=none"):
        assert (await visit(path, Role.ADMIN)).status_code in (404, 422)
    assert (await visit("/sessions?cursor=x", Role.VIEWER)).status_code in (200, 422)


async def test_a_conversation_in_a_browser(browser_page: BrowserPage, concierge: App) -> None:
    page = browser_page.page
    session = concierge.session(Concierge, "user-42")
    await session.send("Where is my parcel?", sender="carol")
    await session.send(ALL_HOSTILE)
    await work_off(concierge)
    await browser_page.goto("/sessions")
    await check_accessible(page)
    await page.get_by_role("link", name="user-42").click()
    await expect(page.get_by_role("region", name="Turn 1")).to_contain_text("You wrote: Where is my parcel?")
    await assert_nothing_ran(page)
    await check_accessible(page)
    await page.get_by_role("link", name="Send a message").click()
    await page.get_by_label("Message").fill("And today?")
    await check_accessible(page)
    await page.get_by_role("button", name="Send").click()
    turn = page.get_by_role("region", name="Turn 3")
    await expect(turn).to_contain_text("running")
    async with running_worker(concierge):
        await expect(turn).to_contain_text("You wrote: And today?")  # live: the page is not opened again
    await page.get_by_role("link", name="Forget").click()
    await check_accessible(page)
    await page.get_by_role("button", name="Forget").click()
    await expect(page.get_by_role("status").filter(has_text="is deleted")).to_be_visible()


async def test_pictures_of_a_conversation(browser_page: BrowserPage, concierge: App) -> None:
    page = browser_page.page
    session = concierge.session(Concierge, "user-42")
    for text in ("Where is my parcel?", "It was to arrive on Friday.", "And today?"):
        await session.send(text, sender="carol")
        await work_off(concierge)
    await browser_page.goto("/sessions")
    await expect(page.get_by_role("link", name="user-42")).to_be_visible()
    await screenshot(page, "sessions")
    await browser_page.goto("/sessions/concierge?session=user-42")
    await expect(page.get_by_role("region", name="Turn 3")).to_be_visible()
    await screenshot(page, "session")
