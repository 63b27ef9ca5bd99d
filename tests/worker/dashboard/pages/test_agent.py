"""Pages of a task about its agent: handoff, plan, decisions, states, prompts, costs, findings and artifacts."""

from __future__ import annotations

import re

import pytest
from perdure import App, TaskHandle
from perdure.web import Role
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.travel_agent import Travels, travelled
from tests.support.workers import history, work_off
from tests.worker.dashboard.conftest import BrowserPage, Visit

TABS = ("handoff", "plan", "timeline", "state", "prompts", "costs", "findings", "identity", "artifacts")


class Tourist(Travels):
    """An agent for pictures."""

    said = "the museum is near, and its tickets are valid for two days"


async def toured(app: App) -> TaskHandle[object]:
    """Return a task that has succeeded, with plain texts."""
    return await travelled(app, Tourist, goal="Plan two days in Rome")


async def number_of(handle: TaskHandle[object], kind: str) -> int:
    """Return the number of the last event of a type."""
    return next(event.number for event in reversed(await history(handle)) if event.type == kind and event.number)


async def test_each_tab_shows_what_the_task_has(app: App, visit: Visit) -> None:
    handle = await travelled(app)
    expected = {
        "handoff": "Decided and why",
        "plan": "of 2",
        "timeline": "go to Oslo",
        "state": "What it knew after event",
        "prompts": "State after event",
        "costs": "0.002",
        "findings": "have found nothing",
        "identity": "No run has resumed this task.",
        "artifacts": "ticket.html",
    }
    for tab in TABS:
        response = await visit(f"/tasks/{handle.id}/{tab}", Role.VIEWER)
        assert response.status_code == 200, tab
        assert expected[tab] in response.text, tab
        assert_harmless(response.text)


async def test_hostile_text_in_every_field_is_text(app: App, visit: Visit) -> None:
    class Hostile(Travels):
        """An agent all of whose texts are hostile."""

        said = ALL_HOSTILE

    handle = await travelled(app, Hostile, goal=ALL_HOSTILE)
    paths = [*TABS, "prompts/1", "plan/step?key=book", "state/field?name=goal", "state?at=9&against=3", "correct"]
    for path in paths:
        response = await visit(f"/tasks/{handle.id}/{path}", Role.ADMIN)
        assert response.status_code == 200, path
        assert_harmless(response.text)


async def test_a_state_that_is_not_known_is_said_beside_the_form(app: App, visit: Visit) -> None:
    handle = await travelled(app)
    response = await visit(f"/tasks/{handle.id}/state?at=900", Role.VIEWER)
    assert response.status_code == 200
    assert "has no event 900" in response.text
    assert (await visit(f"/tasks/{handle.id}/prompts/77", Role.VIEWER)).status_code == 404
    assert (await visit(f"/tasks/{handle.id}/state?at=nonsense", Role.VIEWER)).status_code == 200


async def test_an_artifact_is_a_file_and_never_a_page(app: App, visit: Visit) -> None:
    handle = await travelled(app)
    response = await visit(f"/tasks/{handle.id}/artifact?name=ticket.html", Role.VIEWER)
    assert response.headers["content-disposition"].startswith("attachment;")
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content.startswith(b"<script>")


@pytest.mark.parametrize("page", ["correct", "findings/1/dismiss"])
async def test_a_viewer_cannot_act(app: App, visit: Visit, page: str) -> None:
    handle = await travelled(app)
    assert (await visit(f"/tasks/{handle.id}/{page}", Role.VIEWER)).status_code == 403
    assert (await visit(f"/tasks/{handle.id}/{page}", Role.VIEWER, form={"path": "city"})).status_code == 403


async def test_a_correction_is_sent_with_the_name_of_the_user(app: App, visit: Visit) -> None:
    handle = await app.agent(Travels, name="travels").enqueue("travel")
    response = await visit(f"/tasks/{handle.id}/correct", Role.OPERATOR, form={"path": "city", "value": '"Lima"'})
    assert response.status_code == 303
    assert response.headers["location"].endswith(f"/tasks/{handle.id}/state")
    await work_off(app)
    (event,) = [event for event in await history(handle) if event.type == "corrected"]
    assert (event.data["paths"], event.data["by"]) == (["city"], "ada")


async def test_what_does_not_fit_the_state_is_shown_beside_the_form(app: App, visit: Visit) -> None:
    handle = await travelled(app)
    response = await visit(f"/tasks/{handle.id}/correct", Role.OPERATOR, form={"path": "town", "value": "Lima"})
    assert response.status_code in (409, 422)
    assert "the state has no field &#39;town&#39;" in response.text
    empty = await visit(f"/tasks/{handle.id}/correct", Role.OPERATOR, form={"value": "Lima"})
    assert "give at least one change" in empty.text


async def test_from_a_decision_to_what_it_changed_and_to_the_prompt(browser_page: BrowserPage) -> None:
    page, app = browser_page.page, browser_page.dashboard.app
    handle = await toured(app)
    await browser_page.goto(f"/tasks/{handle.id}/timeline")
    await check_accessible(page)
    await screenshot(page, "agent-decisions")
    number = await number_of(handle, "decided")
    await page.get_by_role("link", name=f"Changes by event {number}", exact=True).click()
    await expect(page.get_by_role("heading", name=f"Event {number}: decided")).to_be_visible()
    await expect(page.get_by_role("rowheader", name="/decisions/-")).to_be_visible()
    await check_accessible(page)
    await screenshot(page, "agent-state-difference")
    await page.get_by_role("link", name="Prompts").click()
    await check_accessible(page)
    await screenshot(page, "agent-prompts")
    await page.get_by_role("rowheader").get_by_role("link", name="2").click()
    await expect(page.get_by_role("heading", name=re.compile("1. system"))).to_be_visible()
    await check_accessible(page)
    await screenshot(page, "agent-prompt")


async def test_hostile_text_runs_nothing_in_a_browser(browser_page: BrowserPage) -> None:
    class Hostile(Travels):
        """An agent all of whose texts are hostile."""

        said = ALL_HOSTILE

    handle = await travelled(browser_page.dashboard.app, Hostile, goal=ALL_HOSTILE)
    for path in ("handoff", "plan", "timeline", "state", "prompts/1", "artifacts", "correct"):
        await browser_page.goto(f"/tasks/{handle.id}/{path}")
        await assert_nothing_ran(browser_page.page)


@pytest.mark.parametrize("tab", ["handoff", "plan", "state", "costs", "findings", "identity", "artifacts"])
async def test_each_tab_in_a_browser(browser_page: BrowserPage, tab: str) -> None:
    handle = await toured(browser_page.dashboard.app)
    await browser_page.goto(f"/tasks/{handle.id}/{tab}")
    await check_accessible(browser_page.page)
    await screenshot(browser_page.page, f"agent-{tab}")


async def test_a_person_corrects_a_field(browser_page: BrowserPage) -> None:
    page, app = browser_page.page, browser_page.dashboard.app
    handle = await app.agent(Tourist, name="travels").enqueue("Plan two days in Rome")
    await browser_page.goto(f"/tasks/{handle.id}/correct")
    await check_accessible(page)
    await page.get_by_label("Field").fill("city")
    await page.get_by_label("Value").fill("Lima")
    await screenshot(page, "agent-correct")
    await page.get_by_role("button", name="Send the correction").click()
    await expect(page.get_by_role("status").filter(has_text="The correction was sent")).to_be_visible()
