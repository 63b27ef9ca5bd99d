"""Fixtures of the dashboard: pages in the process of the test, and a browser before a real server.

All async tests of this folder, and their fixtures, run in one event loop, since the browser is shared.

    async def test_a_page(visit: Visit, app: App) -> None:                  # without a browser: milliseconds
        response = await visit("/tasks", Role.VIEWER)

    async def test_a_page_in_a_browser(browser_page: BrowserPage) -> None:  # marked `browser` by the fixture
        await browser_page.goto("/tasks")
        await check_accessible(browser_page.page)
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import pytest_asyncio
import uvicorn
from perdure import App
from perdure.web import Role, User
from perdure.worker.dashboard import live
from perdure.worker.dashboard.application import application, load_pages
from perdure.worker.dashboard.page import PAGES
from perdure.worker.settings import Settings
from perdure.worker.web.operation import OPERATIONS
from perdure.worker.web.router import load_operations
from perdure.worker.web.server import make_server
from perdure.worker.web.service import Service
from playwright.async_api import Browser, Page, Response
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from tests.support.browser import SCREENSHOTS, find_browser, started_browser, watched_page

FOLDER = Path(__file__).parent
SECRET = b"0123456789abcdef0123456789abcdef"
HOST = "dashboard.test"
KEPT_ENVIRONMENT = {name: value for name in (SCREENSHOTS,) if (value := os.environ.get(name))}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the browser, and let all of this folder share an event loop."""
    for item in items:
        if FOLDER in item.path.parents and isinstance(item, pytest.Function):
            if inspect.iscoroutinefunction(item.function):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.integration)
            if "browser_page" in item.fixturenames:
                item.add_marker(pytest.mark.browser)


@pytest.fixture(autouse=True)
def keep_screenshots(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the variable that asks for screenshots."""
    for name, value in KEPT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def steady_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update open pages once a second on a loaded machine too, where reading one takes long."""
    monkeypatch.setattr(live, "_SHARE", 0)


@pytest_asyncio.fixture(loop_scope="session")
async def app(settings: Settings) -> AsyncIterator[App]:
    """An open app of the name `shop`."""
    async with App("shop", settings=settings) as app:
        yield app


@pytest.fixture
def own_pages() -> Iterator[None]:
    """Forget the pages and operations that the test registers."""
    load_operations()
    load_pages()
    pages, operations = dict(PAGES), dict(OPERATIONS)
    yield
    PAGES.clear()
    PAGES.update(pages)
    OPERATIONS.clear()
    OPERATIONS.update(operations)


def user_of(request: HTTPConnection) -> User | None:
    """Return the user that the test names in headers."""
    name = request.headers.get("x-user")
    tenant = request.headers.get("x-tenant")
    return None if name is None else User(name, request.headers["x-roles"].split(), tenant)


class Visit(Protocol):
    """Opens a page, or sends a form, as a user of these roles; see `visit`."""

    async def __call__(
        self,
        path: str,
        *roles: Role,
        params: dict[str, Any] | None = None,
        form: dict[str, Any] | None = None,
        name: str = "ada",
        **headers: str,
    ) -> httpx.Response: ...


@pytest_asyncio.fixture(loop_scope="session")
async def visit(app: App) -> AsyncIterator[Visit]:
    """`await visit("/path", Role.VIEWER)` opens a page, with `form={...}` it sends a form. No browser, no server.

    Headers are named with `_` for `-`. Redirects are not followed; cookies are kept.
    """
    site = application(Service(app, authenticate=user_of, secret=SECRET), actions=True, hosts={HOST})
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/sub", site)]))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}/sub") as client:

        async def opened(
            path: str,
            *roles: Role,
            params: dict[str, Any] | None = None,
            form: dict[str, Any] | None = None,
            name: str = "ada",
            **headers: str,
        ) -> httpx.Response:
            sent = {"x-user": name, "x-roles": " ".join(roles)} if roles else {}
            if form is not None:
                sent["sec-fetch-site"] = "same-origin"
            sent |= {key.replace("_", "-"): value for key, value in headers.items()}
            path = path.removeprefix("/sub")
            if form is None:
                return await client.get(path, params=params, headers=sent)
            return await client.post(path, params=params, data=form, headers=sent)

        yield opened


@dataclass(slots=True)
class Dashboard:
    """A dashboard that a real server serves under a sub-path, with actions. A test may set its `user`."""

    app: App
    url: str
    user: User


@pytest_asyncio.fixture(loop_scope="session")
async def dashboard(app: App) -> AsyncIterator[Dashboard]:
    """The dashboard of the app, on a free port of this machine, under the path /fleet."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/fleet"
    found = Dashboard(app, url, User("ada", [Role.ADMIN]))
    site = application(Service(app, authenticate=lambda _: found.user, secret=SECRET), actions=True, hosts=())
    async with served(Starlette(routes=[Mount("/fleet", site)]), listener):
        yield found


class _Server:
    """A server in the event loop of the test."""

    def __init__(self, site: Any, listener: socket.socket) -> None:
        self._server: uvicorn.Server = make_server(site, "127.0.0.1", 0)
        self._server.config.lifespan = "off"
        self._listener = listener

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._server._serve([self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._task.done():
                await self._task

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task


def served(site: Any, listener: socket.socket) -> _Server:
    """Serve an application on a socket."""
    return _Server(site, listener)


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, started on first use."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    async with started_browser(program) as started:
        yield started


@dataclass(slots=True)
class BrowserPage:
    """A page of the browser before the dashboard of the test.

    Attributes:
        expected: Parts of reports of the console that the test expects, such as "status of 404".
    """

    dashboard: Dashboard
    page: Page
    expected: list[str] = field(default_factory=list)

    async def goto(self, path: str) -> Response:
        """Open a page of the dashboard by its path below it."""
        response = await self.page.goto(f"{self.dashboard.url}{path}")
        assert response is not None
        return response


@pytest_asyncio.fixture(loop_scope="session")
async def browser_page(browser: Browser, dashboard: Dashboard) -> AsyncIterator[BrowserPage]:
    """A page with cookies of its own. Errors of scripts, dialogs, and what the policy refuses fail the test."""
    context = await browser.new_context(locale="en-GB", timezone_id="UTC")
    try:
        async with watched_page(context) as watched:
            yield BrowserPage(dashboard, watched.page, watched.expected)
            unexpected: Sequence[str] = watched.unexpected()
            assert not unexpected, "\n".join(unexpected)
    finally:
        await context.close()
