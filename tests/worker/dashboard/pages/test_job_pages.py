"""Jobs in the dashboard: the list, progress, abort, removal, and the form that cancels many tasks."""

from __future__ import annotations

import html
import re

import pytest
import pytest_asyncio
from perdure import App
from perdure.queues.jobs import JobPlan, JobStore
from perdure.web import Role
from perdure.worker.job_runner import JobRunner
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless
from tests.worker.dashboard.conftest import BrowserPage, Visit


@pytest_asyncio.fixture(loop_scope="session")
async def ids(app: App) -> list[str]:
    """Ids of tasks that wait in a queue without a worker."""
    tasks = await app.producer.enqueue_many("other", [{"n": n} for n in range(4)], queue="backlog")
    return [task.id for task in tasks]


async def make_job(app: App, name: str, *, why: str = "", queue: str | None = "backlog") -> None:
    store = JobStore(app.producer.gateway, app.producer.namespace)
    await store.create(name, "cancel", lambda now: JobPlan(queue, {"until": now, "error": why}), by="bob", why=why)


async def states(app: App, ids: list[str]) -> list[str]:
    handles = [await app.producer.find(task_id) for task_id in ids]
    return [str(await handle.status()) if handle else "gone" for handle in handles]


async def test_the_form_shows_which_tasks_a_job_cancels(app: App, ids: list[str], visit: Visit) -> None:
    path = "/task-jobs/cancel?queue=backlog&where=n%3D2"
    listed = await visit("/tasks?queue=backlog&where=n%3D2", Role.OPERATOR)
    assert f"/sub{path}" in html.unescape(listed.text)
    shown = await visit(path, Role.OPERATOR)
    assert "A job cancels 1 task (1 queued)." in shown.text
    assert ids[2] in shown.text
    until = re.search(r'name="until" value="([^"]*)"', shown.text)
    assert until is not None
    response = await visit(path, Role.OPERATOR, form={"until": html.unescape(until[1]), "why": "not needed"})
    assert response.status_code == 303
    async for _ in JobRunner(app.producer, "test").run(response.headers["location"].rpartition("/")[2]):
        pass
    assert await states(app, ids) == ["queued", "queued", "cancelled", "queued"]


@pytest.mark.parametrize("query", ["state=asleep", "queu=backlog", "where=n", "since=soon"])
async def test_a_filter_that_is_not_valid_selects_no_tasks(visit: Visit, ids: list[str], app: App, query: str) -> None:
    for form in (None, {"why": "x"}):
        assert (await visit(f"/task-jobs/cancel?{query}", Role.OPERATOR, form=form)).status_code == 422
    assert (await visit("/jobs", Role.VIEWER)).text.count("cancel-") == 0


async def test_jobs_are_aborted_and_removed_once(app: App, ids: list[str], visit: Visit) -> None:
    await make_job(app, "nightly")
    assert "nightly" in (await visit("/jobs", Role.VIEWER)).text
    assert (await visit("/jobs/nightly/abort", Role.VIEWER, form={})).status_code == 403
    assert "It has looked at 0" in (await visit("/jobs/nightly/abort", Role.OPERATOR)).text
    assert (await visit("/jobs/nightly/remove", Role.OPERATOR, form={})).status_code == 409, "it has not ended"
    assert (await visit("/jobs/nightly/abort", Role.OPERATOR, form={}, name="bob")).status_code == 303
    assert "Aborted by" in (await visit("/jobs/nightly", Role.VIEWER)).text
    response = await visit("/jobs/nightly/abort", Role.OPERATOR, form={})
    assert response.status_code == 409
    assert "has ended, it is aborted" in html.unescape(response.text)
    assert (await visit("/jobs/nightly/remove", Role.OPERATOR, form={})).status_code == 303
    assert (await visit("/jobs/nightly", Role.VIEWER)).status_code == 404
    assert await states(app, ids) == ["queued"] * 4


async def test_hostile_text_of_a_job_is_harmless(app: App, ids: list[str], visit: Visit) -> None:
    await make_job(app, "odd", why=ALL_HOSTILE[:1_900])
    for path in ("/jobs", "/jobs/odd", "/jobs/odd/abort"):
        response = await visit(path, Role.OPERATOR)
        assert response.status_code == 200
        assert_harmless(response.text)


async def test_a_job_is_aborted_in_a_browser(browser_page: BrowserPage, ids: list[str]) -> None:
    page, app = browser_page.page, browser_page.dashboard.app
    await make_job(app, "nightly-clean-up", why="the queue is full")
    await browser_page.goto("/jobs")
    await check_accessible(page)
    await screenshot(page, "jobs")
    await page.get_by_role("link", name="nightly-clean-up").click()
    await page.get_by_role("link", name="Abort").click()
    await check_accessible(page)
    await page.get_by_role("button", name="Abort the job").click()
    await expect(page.get_by_role("status").filter(has_text="is aborted")).to_be_visible()
    assert await states(app, ids) == ["queued"] * 4


async def test_matching_tasks_are_cancelled_in_a_browser(browser_page: BrowserPage, ids: list[str]) -> None:
    page = browser_page.page
    await browser_page.goto("/task-jobs/cancel?queue=backlog")
    await check_accessible(page)
    await screenshot(page, "tasks-cancel")
    await page.get_by_role("button", name="Cancel them").click()
    await expect(page.get_by_role("progressbar")).to_be_visible()
