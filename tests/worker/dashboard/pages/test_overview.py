"""The overview: figures, queues, workers and running tasks, live."""

from __future__ import annotations

import asyncio
import re
import time

from perdure import App, Context
from perdure.queues.pauses import PauseRule, PauseStore
from perdure.queues.presence import WorkerInfo, announce
from perdure.web import Role
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import running_worker
from tests.worker.dashboard.conftest import BrowserPage, Visit


async def test_the_overview_shows_queues_with_their_figures(app: App, visit: Visit) -> None:
    await app.producer.enqueue_many("audit", [{"root": str(number)} for number in range(3)], queue="files")
    await app.producer.enqueue("later", {}, queue="files", delay=60)
    page = (await visit("/", Role.VIEWER)).text
    row = re.search(r'<th scope="row">.*?files.*?</tr>', page, re.DOTALL)
    assert row is not None
    assert re.findall(r'<td class="number">([^<]*)</td>', row[0])[:8] == ["3", "0", "1", "0", "0", "0", "0", "0.0/s"]
    assert "<dt>Ready</dt><dd>3" in page
    assert "<dt>Scheduled</dt><dd>1" in page
    assert "<dt>Drained in</dt><dd>?" in page, "no worker settles anything"


async def test_the_overview_stays_bounded(app: App, visit: Visit) -> None:
    for number in range(120):
        await app.producer.enqueue("audit", {}, queue=f"files-{number}")
    await app.producer.enqueue_many("audit", [{"n": number} for number in range(5_000)], queue="files-119")
    began = time.perf_counter()
    response = await visit("/", Role.VIEWER)
    took = time.perf_counter() - began
    assert response.text.count('<th scope="row">') == 100
    assert "100 of 120 queues, those with most tasks." in response.text
    assert response.text.index("files-119") < response.text.index("files-1<"), "the queue with most tasks comes first"
    assert len(response.content) < 150_000
    assert took < 5, "the cost is that of the queues, not of their tasks; the bound is for loaded machines"


async def test_hostile_workers_and_pauses_are_text(app: App, visit: Visit) -> None:
    gateway, namespace = app.producer.gateway, app.producer.namespace
    for number, hostile in enumerate((*HOSTILE.values(), ALL_HOSTILE)):
        info = WorkerInfo(f"w{number}", hostile, hostile, 1, hostile, (hostile,), 1, 0, 0)
        await announce(gateway, namespace, info, 60)
    await PauseStore(gateway, namespace).add(PauseRule("files", by="eve", why=ALL_HOSTILE[:400]))
    response = await visit("/", Role.VIEWER)
    assert response.status_code == 200
    assert_harmless(response.text)


async def test_the_overview_in_a_browser(browser_page: BrowserPage, app: App) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task(queue="reports")
    async def write_report(ctx: Context, month: str) -> None:
        async def wait() -> None:
            started.set()
            await finish.wait()

        await ctx.step("render pages", wait)

    @app.task(queue="mail")
    async def send_mail(ctx: Context, to: str) -> None: ...

    page = browser_page.page
    await browser_page.goto("/")
    await expect(page.get_by_text("No queues yet")).to_be_visible()
    await app.producer.enqueue_many("send_mail", [{"to": "ada@example.com"} for _ in range(40)], queue="mail")
    await PauseStore(app.producer.gateway, app.producer.namespace).add(
        PauseRule("mail", by="ada", why="the provider is away")
    )
    await write_report.enqueue("2026-01")
    async with running_worker(app, concurrency=4):
        await started.wait()
        await expect(page.get_by_role("rowheader", name="reports", exact=True)).to_be_visible()
        await expect(page.get_by_role("rowheader", name="write_report")).to_be_visible()
        await expect(page.get_by_text("the provider is away")).to_be_visible()
        await check_accessible(page)
        await screenshot(page, "overview")
        await assert_nothing_ran(page)
        finish.set()
