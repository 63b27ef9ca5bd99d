"""Bad days: Redis is away or comes back, a client does not read, and the server stops while pages are open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from perdure import App
from perdure.web import Role, User
from perdure.worker.dashboard import live
from perdure.worker.dashboard.application import application
from perdure.worker.dashboard.page import Html
from perdure.worker.settings import Settings
from perdure.worker.web.service import Service
from playwright.async_api import Browser, expect

from tests.support.browser import watched_page
from tests.support.servers import RedisServer

from .conftest import served

_SET_HIDDEN = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest_asyncio.fixture(loop_scope="session")
async def own_server(server_program: Path) -> AsyncIterator[RedisServer]:
    """A Redis server that the test may stop."""
    server = RedisServer(server_program).start()
    yield server
    server.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def url(own_server: RedisServer, namespace_name: str) -> AsyncIterator[str]:
    """URL of a dashboard over a Redis that the test may stop."""
    settings = Settings(redis_url=own_server.url, namespace=namespace_name)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    async with App("shop", settings=settings) as app:
        await app.producer.enqueue("audit", {}, queue="files")
        site = application(Service(app, authenticate=lambda _: User("ada", [Role.ADMIN])))
        async with served(site, listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_pages_say_that_redis_is_away(url: str, own_server: RedisServer) -> None:
    own_server.kill()
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.get(url)
        assert response.status_code == 503
        assert "The problem is one of Redis, not of this page." in response.text
        assert 'role="alert"' in response.text
        assert "Traceback" not in response.text
        assert (await client.get(f"{url}/sign-in")).status_code == 404, "what needs no Redis is served"


async def test_an_open_page_says_that_redis_is_away_and_continues(
    browser: Browser, url: str, own_server: RedisServer
) -> None:
    context = await browser.new_context()
    async with watched_page(context) as watched:
        page = watched.page
        await page.goto(url)
        await expect(page.get_by_role("rowheader", name="files")).to_be_visible()
        own_server.kill()
        await expect(page.get_by_text("Not up to date")).to_be_visible()
        await expect(page.get_by_role("rowheader", name="files")).to_be_visible()
        own_server.start()
        await expect(page.get_by_text("Not up to date")).to_have_count(0)
        assert not watched.unexpected()
    await context.close()


async def test_a_page_that_is_shown_again_without_redis_keeps_what_it_shows(
    browser: Browser, url: str, own_server: RedisServer
) -> None:
    """Its first stream is closed while it is hidden, and no read of the second one succeeds at first."""
    context = await browser.new_context()
    async with watched_page(context) as watched:
        page = watched.page
        await page.goto(url)
        await expect(page.get_by_role("rowheader", name="files")).to_be_visible()
        await page.evaluate(_SET_HIDDEN, True)
        own_server.kill()
        await page.evaluate(_SET_HIDDEN, False)
        await expect(page.get_by_text("Not up to date")).to_be_visible()
        await expect(page.get_by_role("rowheader", name="files")).to_be_visible()
        own_server.start()
        await expect(page.get_by_text("Not up to date")).to_have_count(0)
        assert not watched.unexpected()
    await context.close()


async def test_a_client_that_reads_nothing_is_left(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def read() -> Html:
        nonlocal sent
        sent += 1
        return Html(f"{live.START}{sent}{'x' * 1_000_000}{live.END}")

    monkeypatch.setattr(live, "INTERVAL", 0.0)
    monkeypatch.setattr(live, "_SHARE", 0)
    monkeypatch.setattr(live, "_SEND_TIMEOUT", 0.2)
    blocked = asyncio.Event()
    frames = 0

    async def receive() -> dict[str, object]:
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        nonlocal frames
        frames += message["type"] == "http.response.body"
        if frames >= 3:
            await blocked.wait()  # the buffers of the connection are full

    response = live.live_stream(read)
    await response({"type": "http", "method": "GET"}, receive, send)  # type: ignore[arg-type]
    assert sent <= 4, "it renders no more than the client reads"
