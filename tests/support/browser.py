"""A browser for tests of pages: Chromium, driven by Playwright. What its console reports fails the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from axe_playwright_python.base import AXE_FILE_PATH  # type: ignore[import-untyped]
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.support.paths import ROOT

Look = Literal["light", "dark", "phone"]

LOOKS: Final[Sequence[Look]] = ("light", "dark", "phone")

IMAGES: Final = ROOT / "docs" / "images" / "dashboard"

_DESK: Final = {"width": 1280, "height": 800}
_PHONE: Final = {"width": 390, "height": 844}

expect.set_options(timeout=60_000)  # ends a failing test only; the machine may be loaded

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name)) is not None), None)


@asynccontextmanager
async def started_browser(program: str) -> AsyncIterator[Browser]:
    """Start a browser without a window."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"], headless=True
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(slots=True)
class Watched:
    """A page, and what its console has reported: errors, refused scripts and styles, failed requests.

    expected: Parts of reports that the test expects, such as the status of a page of a problem.
    """

    page: Page
    reports: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def unexpected(self) -> list[str]:
        """Return the reports that the test does not expect."""
        return [report for report in self.reports if not any(part in report for part in self.expected)]


@asynccontextmanager
async def watched_page(context: BrowserContext) -> AsyncIterator[Watched]:
    """Open a page, and watch its console."""
    page = await context.new_page()
    page.set_default_timeout(60_000)
    watched = Watched(page)
    page.on("pageerror", lambda error: watched.reports.append(f"error: {error}"))
    page.on("dialog", lambda dialog: watched.reports.append(f"dialog: {dialog.message}"))
    page.on(
        "console",
        lambda message: watched.reports.append(f"console: {message.text}") if message.type in _REPORTED else None,
    )
    yield watched


_REPORTED: Final = ("error", "warning")


async def check_accessible(page: Page) -> None:
    """Fail if axe finds a violation in the page as it looks in light, in dark, and on a phone."""
    for look in LOOKS:
        await set_look(page, look)
        found = await _run_axe(page)
        listed = [
            f"{look}: {violation['id']}: {violation['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for violation in found["violations"]
            for node in violation["nodes"][:3]
        ]
        assert not listed, "\n".join(listed)
        overflow = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{look}: the page is {overflow} pixels wider than its window"
    await set_look(page, "light")


_AXE: Final = Path(AXE_FILE_PATH).read_text("utf-8")


async def _run_axe(page: Page) -> dict[str, Any]:
    # by the debugger, which the policy of the page does not bind
    await page.evaluate(_AXE)
    found: dict[str, Any] = await page.evaluate(
        "axe.run(document, {resultTypes: ['violations'], preload: false, runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', "
        "'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    return found


async def set_look(page: Page, look: Look) -> None:
    """Let a page look as in light, in dark, or on a phone."""
    await page.emulate_media(color_scheme="dark" if look == "dark" else "light")
    await page.set_viewport_size(_PHONE if look == "phone" else _DESK)  # type: ignore[arg-type]


async def screenshot(page: Page, name: str) -> None:
    """Store a page as docs/images/dashboard/NAME-{light,dark,phone}.png, if PERDURE_SCREENSHOTS is 1."""
    if os.environ.get(SCREENSHOTS) != "1":
        return
    IMAGES.mkdir(parents=True, exist_ok=True)
    await page.evaluate("document.querySelector('footer').hidden = true")  # it names the server of the test
    await page.evaluate(_RENAME, str(ROOT))
    for look in LOOKS:
        await set_look(page, look)
        await page.screenshot(path=IMAGES / f"{name}-{look}.png", full_page=True, animations="disabled")
    await set_look(page, "light")


_RENAME: Final = """root => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const folder = new RegExp(root.replace(/[.*+?^${}()|[\\]\\\\]/g, "\\\\$&") + "(/build/[^/]+)?", "g");
    while (texts.nextNode()) {
        texts.currentNode.data = texts.currentNode.data.replace(folder, "/srv/shop");
    }
}"""
"""Replaces the folder of the project in tracebacks, which is another one on each machine."""

SCREENSHOTS: Final = "PERDURE_SCREENSHOTS"
