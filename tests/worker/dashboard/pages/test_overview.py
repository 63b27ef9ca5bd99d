"""The overview: figures, queues, workers and running tasks, live."""

from __future__ import annotations

from perdure import App
from perdure.web import Role
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.worker.dashboard.conftest import BrowserPage, Visit


async def test_the_overview_shows_queues_with_their_figures(app: App, visit: Visit) -> None:
    await app.producer.enqueue_many("audit", [{"root": str(number)} for number in range(3)], queue="files")
    response = await visit("/", Role.VIEWER)
    assert response.status_code == 200
    assert "files" in response.text


async def test_the_overview_is_updated_while_it_is_shown(browser_page: BrowserPage) -> None:
    page = browser_page.page
    await browser_page.goto("/")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    await check_accessible(page)
    await screenshot(page, "overview")
