"""The list of tasks: filters, pages, and what a search has read."""

from __future__ import annotations

import time

import pytest
from perdure import App, Context
from perdure.queues.inspection import timeline
from perdure.web import Role
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.workers import work_off
from tests.worker.dashboard.conftest import BrowserPage, Visit


async def test_filters_select_rows_and_stay_in_the_form(app: App, visit: Visit) -> None:
    await app.producer.enqueue("audit", {"tenant": "acme"}, queue="files")
    await app.producer.enqueue("index", {"tenant": "other"}, queue="files")
    response = await visit("/tasks?where=tenant%3Dacme&task=audit&state=queued", Role.VIEWER)
    assert response.status_code == 200
    assert "audit" in response.text
    assert ">index<" not in response.text
    assert 'value="tenant=acme"' in response.text
    assert "Searched 2 of 2 tasks" in response.text


async def test_a_search_says_how_far_it_came(app: App, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CHUNK", "_MAX_READ"):
        monkeypatch.setattr(timeline, name, 2)
    await app.producer.enqueue_many("audit", [{"number": number} for number in range(5)], queue="files")
    response = await visit("/tasks?where=number%3D99", Role.VIEWER)
    assert "No task matches among those that were searched." in response.text
    assert "Searched 2 of 5 tasks" in response.text
    assert "Next page" in response.text


@pytest.mark.parametrize("query", ["cursor=%3F", "where=tenant", "since=soon", "queue=nowhere", "error=" + "x" * 2000])
async def test_a_wrong_filter_hides_no_form(visit: Visit, query: str) -> None:
    response = await visit(f"/tasks?{query}", Role.VIEWER)
    assert response.status_code in (200, 422)
    assert "<form" in response.text
    assert 'role="alert"' in response.text


async def test_ten_thousand_tasks_stay_quick(app: App, visit: Visit) -> None:
    for start in range(0, 10_000, 1_000):
        await app.producer.enqueue_many("audit", [{"number": start + at} for at in range(1_000)], queue="files")
    began = time.perf_counter()
    response = await visit("/tasks", Role.VIEWER)
    took = time.perf_counter() - began
    assert "Searched 100 of 10,000 tasks" in response.text
    assert len(response.content) < 120_000
    assert took < 5, "a page reads 100 records; the bound is for loaded machines"


async def test_the_list_in_a_browser(browser_page: BrowserPage, app: App) -> None:
    @app.task(retry=None)
    async def import_order(ctx: Context, tenant: str) -> None:
        if tenant == "umbrella":
            raise ValueError("order 17 has no address")

    for tenant in ("acme", "umbrella", "initech"):
        await import_order.options(tags=["nightly"]).enqueue(tenant)
    await work_off(app)
    await import_order.options(delay=3600).enqueue("late")
    page = browser_page.page
    await browser_page.goto("/tasks")
    await expect(page.get_by_role("row")).to_have_count(5)
    await check_accessible(page)
    await screenshot(page, "tasks")
    await page.get_by_label("Error text").fill("no address")
    await page.get_by_role("button", name="Filter").click()
    await expect(page.get_by_role("row")).to_have_count(2)
    await page.get_by_role("row").nth(1).get_by_role("link").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("import_order")
