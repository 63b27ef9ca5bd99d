"""examples/fastapi_agent.py in a real browser: its worker and its web server are killed, and the page is refreshed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.browser import check_accessible, find_browser, started_browser, watched_page
from tests.support.command_line import Running
from tests.support.paths import ROOT

PROGRAM = ROOT / "examples" / "fastapi_agent.py"

pytestmark = [pytest.mark.integration, pytest.mark.processes, pytest.mark.browser]


@pytest.fixture(autouse=True)
def environment(redis_url: str, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the programs at the test's server, with a short lease."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_REDIS_URL", redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", namespace_name)
    monkeypatch.setenv("PERDURE_LEASE", "1")
    monkeypatch.setenv("PAUSE", "1.5")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@asynccontextmanager
async def web_server(port: int) -> AsyncIterator[None]:
    """Run the web server, and kill it at the end."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(PROGRAM.parent), "fastapi_agent:web"]
    process = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"])  # noqa: ASYNC220 - at once
    try:
        while True:
            assert process.poll() is None, "the web server has ended"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield
    finally:
        process.kill()
        process.wait()


def worker(folder: Path) -> Running:
    return Running("worker", "run", f"{PROGRAM}:app", "--no-supervisor", cwd=folder)


async def test_an_agent_live_in_a_browser(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium")
    port = free_port()
    async with started_browser(program) as browser:
        context = await browser.new_context()
        async with watched_page(context) as watched:
            page = watched.page
            watched.expected = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE"]
            events, words, question = page.locator("#events li"), page.locator("#words"), page.locator("#question")
            async with web_server(port):
                await page.goto(f"http://127.0.0.1:{port}/")
                await check_accessible(page)
                await page.get_by_label("To").fill("Nice")
                await page.get_by_role("button", name="Plan").click()
                with worker(tmp_path) as killed:
                    await expect(words).to_contain_text("The 09:30 train")  # live: the sentence is not complete yet
                    assert "cheapest" not in await words.inner_text()
                    killed.process.kill()
                with worker(tmp_path) as killed:
                    await expect(question).to_contain_text("Book 09:30 to Nice, 25 euros?")
                    killed.process.kill()
                text, seen = await words.inner_text(), await events.all_inner_texts()
                assert text.strip() == "The 09:30 train to Nice is the cheapest ."
                assert seen.count("tool_called search") == 1
            async with web_server(port):  # another one, and a page that is loaded again
                await page.reload()
                await expect(question).to_contain_text("Book 09:30 to Nice, 25 euros?")
                assert await words.inner_text() == text
                await page.get_by_role("button", name="Yes").click()
                with worker(tmp_path):
                    await expect(page.get_by_role("status")).to_have_text("booked: 09:30 to Nice, 25 euros")
                await expect(question).to_be_hidden()
            assert not watched.unexpected()
