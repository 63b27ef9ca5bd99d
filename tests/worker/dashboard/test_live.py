"""Updates of a page while it is shown: what they send, when they end, and the switch that pauses them."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from perdure import App
from perdure.web import Role, User
from perdure.worker.dashboard import live
from perdure.worker.dashboard.live import END, START, live_part, live_stream
from perdure.worker.dashboard.page import Html
from perdure.worker.web.problems import Problem
from playwright.async_api import expect
from sse_starlette import ServerSentEvent

from .conftest import BrowserPage, Visit


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates follow each other without a pause."""
    monkeypatch.setattr(live, "INTERVAL", 0.01)


def page(text: str) -> Html:
    return Html(f"<p>outside</p>{START}{text}{END}<p>below</p>")


async def frames(*pages: Html | Problem | None) -> list[tuple[str, str]]:
    """Return the frames of a page that is rendered as these, one after the other."""
    left = iter(pages)

    async def read() -> Html | None:
        found = next(left, None)
        if isinstance(found, Problem):
            raise found
        return found

    sent = [frame async for frame in live_stream(read).body_iterator]
    return [(str(frame.event), str(frame.data)) for frame in sent if isinstance(frame, ServerSentEvent)]


def test_the_live_part_is_what_the_marks_enclose() -> None:
    assert live_part(page("<b>1</b>").text) == "<b>1</b>"
    assert live_part("<p>none</p>") == ""


async def test_a_page_is_sent_again_only_when_it_has_changed() -> None:
    sent = await frames(page("1"), page("1"), page("2"), page("2"), page("1"))
    assert sent == [("live", "1"), ("problem", ""), ("live", "2"), ("live", "1"), ("end", "")]


async def test_a_relative_time_is_no_change() -> None:
    first, second = ('<time datetime="2026-01-01">1 s ago</time>', '<time datetime="2026-01-01">2 s ago</time>')
    later = '<time datetime="2026-01-02">2 s ago</time>'
    sent = await frames(page(first), page(second), page(later))
    assert sent == [("live", first), ("problem", ""), ("live", later), ("end", "")]


async def test_a_problem_is_shown_until_it_is_over_and_replaces_nothing() -> None:
    away = Problem(503, "unavailable", "could not reach <Redis>", source="redis")
    alert = '<p class="alert" role="alert">Not up to date: could not reach &lt;Redis&gt;</p>'
    sent = await frames(page("1"), away, away, page("1"))
    assert sent == [("live", "1"), ("problem", ""), ("problem", alert), ("problem", ""), ("end", "")]
    assert await frames(away, page("1")) == [("problem", alert), ("live", "1"), ("problem", ""), ("end", "")]


async def test_a_signed_out_user_gets_no_updates() -> None:
    assert await frames(None) == [("end", "")]


async def test_a_page_that_takes_long_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    times = iter([0.0, 0.002, 1.0, 1.5, 2.0, 12.0, 13.0])
    monkeypatch.setattr(live, "INTERVAL", 1.0)
    monkeypatch.setattr(live, "_SHARE", 20)
    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(live, "monotonic", lambda: next(times))
    await frames(page("1"), page("2"), page("3"))
    assert slept == [1.0, 10.0, 30.0]


async def test_an_open_page_follows_the_deployment(browser_page: BrowserPage) -> None:
    app, page = browser_page.dashboard.app, browser_page.page
    await browser_page.goto("/")
    await expect(page.get_by_text("No queues yet")).to_be_visible()
    await app.producer.enqueue("audit", {}, queue="files")
    await expect(page.get_by_role("rowheader", name="files")).to_be_visible()


async def test_paused_updates_leave_the_page_alone(browser_page: BrowserPage, app: App) -> None:
    page = browser_page.page
    await browser_page.goto("/")
    await page.get_by_role("button", name="Pause updates").click()
    await expect(page.get_by_text("Updates are paused")).to_be_visible()
    assert await page.locator("[sse-connect]").count() == 0
    await app.producer.enqueue("audit", {}, queue="files")
    await page.get_by_role("button", name="Resume updates").click()
    await expect(page.get_by_role("rowheader", name="files")).to_be_visible()


async def test_a_user_who_loses_access_is_shown_out(browser_page: BrowserPage) -> None:
    page = browser_page.page
    await browser_page.goto("/")
    await expect(page.get_by_text("Updates live")).to_be_visible()
    browser_page.expected.append("status of 403")
    browser_page.dashboard.user = User("eve", [Role.PRODUCER])
    await expect(page.get_by_text("must have the role viewer")).to_be_visible()


async def test_the_pause_is_kept_and_ended(visit: Visit) -> None:
    paused = await visit("/updates", Role.VIEWER, form={"updates": "paused", "next": "/?a=1"})
    assert paused.headers["location"] == "/sub/?a=1"
    assert "sse-connect" not in (await visit("/", Role.VIEWER)).text
    await visit("/updates", Role.VIEWER, form={"updates": "live", "next": "//evil.example"})
    assert "sse-connect" in (await visit("/", Role.VIEWER)).text


async def test_an_open_stream_ends_with_its_client(browser_page: BrowserPage) -> None:
    before = len(asyncio.all_tasks())
    await browser_page.goto("/")
    await browser_page.page.goto("about:blank")
    while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - the server closes it when it notices
        await asyncio.sleep(0.01)
