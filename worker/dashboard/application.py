"""The dashboard as an ASGI application, on its own or mounted under any path of another application."""

from __future__ import annotations

import importlib
import pkgutil
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...queues.errors import PerdureError
from ..log import logger
from ..web.answer_page import answer_routes
from ..web.binding import parse_form, read_bytes
from ..web.guards import PageHeaders, check_host, check_origin
from ..web.operation import check_scope
from ..web.problems import Problem, invalid, problem_of
from ..web.router import load_operations
from ..web.service import Service
from ..web.users import TokenFile, User
from . import pages
from .live import live_stream
from .page import PAGES, Html, Page, PageRequest, root_of
from .rendering import STATIC, render
from .sign_in import NOTICE_COOKIE, PAUSE_COOKIE, Notices, Sessions, SignedCookies, attributes, end_session

if TYPE_CHECKING:
    from ...queues.producer import Producer
    from ..app import App
    from ..web.service import Authenticate

_MAX_TOKEN_FORM: Final = 16 << 10
"""Bytes of the form of a token at most."""


def dashboard(
    app: App | Producer,
    *,
    tokens: str | Path | None = None,
    authenticate: Authenticate | None = None,
    actions: bool = False,
    secret: bytes = b"",
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Return the dashboard as an ASGI application.

    It works under any path: `site.mount("/perdure", dashboard(app, authenticate=find_user))`. An application that
    mounts it opens the app in its lifespan: `async with app: yield`.

    Args:
        app: The app, or an open producer.
        tokens: Token file; users sign in with a token of it. `perdure web token` writes one.
        authenticate: Returns the `User` of a request, or None, in place of tokens. It may be async.
        actions: Whether users with the role may change anything. Default: all read only.
        secret: Key of the cookies, at least 32 random bytes; all processes of a deployment share it. Default: a key of
            this process, so sessions end with it.
        hosts: Names of hosts that requests may name, apart from addresses and the names of this machine. Default: any.

    Raises:
        ConfigurationError: Neither or both of `tokens` and `authenticate` are given, or the file cannot be read.
    """
    known = TokenFile(Path(tokens)) if tokens is not None else None
    return application(Service(app, known, authenticate, secret), actions=actions, hosts=hosts)


def application(service: Service, *, actions: bool = False, hosts: Collection[str] | None = None) -> Starlette:
    """Return the dashboard of a service as an ASGI application."""
    load_operations()
    load_pages()
    cookies = SignedCookies(service.secret or secrets.token_bytes(32))
    sessions = Sessions(cookies, service.tokens) if service.tokens is not None else None
    site = _Site(service, sessions, Notices(cookies), actions, frozenset(hosts) if hosts is not None else None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.open():
            yield

    ordered = sorted(PAGES.values(), key=lambda known: [part.startswith("{") for part in known.path.split("/")])
    routes = [
        Route(known.path, site.endpoint(known), methods=["GET", "POST"] if known.changes else ["GET"], name=known.name)
        for known in ordered
    ]
    found = Starlette(
        routes=[
            Route("/sign-in", site.guarded(site.sign_in), methods=["GET", "POST"]),
            Route("/sign-out", site.guarded(site.sign_out), methods=["POST"]),
            Route("/updates", site.guarded(site.switch_updates), methods=["POST"]),
            Mount("/static", _StaticFiles(directory=STATIC, follow_symlink=True)),
            *(answer_routes(service) if actions else ()),  # an answer changes something
            *routes,
        ],
        middleware=[Middleware(PageHeaders)],
        exception_handlers={HTTPException: site.not_routed},
        lifespan=lifespan,
    )
    found.router.redirect_slashes = False
    return found


def load_pages() -> None:
    """Import all modules of pages, which register what they define."""
    for module in pkgutil.iter_modules(pages.__path__):
        importlib.import_module(f"{pages.__name__}.{module.name}")


class _StaticFiles(StaticFiles):
    """Static files, which browsers keep: their addresses name a version."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


@dataclass(frozen=True, slots=True)
class _Site:
    """Requests of pages, of the sign-in and of the pause switch."""

    service: Service
    sessions: Sessions | None
    notices: Notices
    actions: bool
    hosts: frozenset[str] | None

    def guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that checks host and origin, and shows problems as pages."""

        async def endpoint(request: Request) -> Response:
            try:
                check_host(request, self.hosts)
                check_origin(request)
                return await answer(request)
            except Exception as error:  # noqa: BLE001 - see problem_from
                return await self.show_problem(request, problem_from(error, request))

        return endpoint

    def endpoint(self, known: Page) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a page."""

        async def answer(request: Request) -> Response:
            user = await self.user_of(request)
            if user is None:
                return self.ask_to_sign_in(request)
            if known.live and "text/event-stream" in request.headers.get("accept", ""):
                self.service.check_running(user)
                return live_stream(lambda: self._again(known, request, user), self.service.running(user))
            return await self.show(known, request, user)

        return self.guarded(answer)

    async def user_of(self, request: Request) -> User | None:
        """Return the user by the session, or by the application that mounts the dashboard."""
        if self.sessions is not None:
            return self.sessions.user_of(request)
        return await self.service.user_of(request)

    async def show(self, known: Page, request: Request, user: User) -> Response:
        """Return the response of a page."""
        made = await self._request(known, request, user)
        found = await self._run(known, made)
        response = HTMLResponse(found.text, found.status) if isinstance(found, Html) else found
        if made.notice is not None and isinstance(found, Html):
            response.delete_cookie(NOTICE_COOKIE, **attributes(request))
        response.headers["Vary"] = "Accept, Cookie"
        return response

    async def _run(self, known: Page, made: PageRequest) -> Html | Response:
        if not made.user.may(*known.roles):
            wanted = " or ".join(known.roles)
            raise Problem(403, "role-needed", f"user {made.user.name!r} must have the role {wanted} for this page")
        if made.call.producer.namespace.tenant is not None:
            if known.path == "/":  # the overview is about the whole deployment
                return RedirectResponse(made.url("tasks"), 303)
            check_scope(made.call, known.path, f"open {known.title!r}")
        if known.changes and not self.actions:
            raise Problem(
                403, "read-only", "this dashboard is read-only: start it with --actions to let users change anything"
            )
        return await known.run(made)

    async def _again(self, known: Page, request: Request, user: User) -> Html | None:
        """Render a page for its event stream; None if the user has been signed out."""
        if await self.user_of(request) != user:
            return None
        try:
            found = await self._run(known, await self._request(known, request, user))
        except Exception as error:
            raise problem_from(error, request) from error
        return found if isinstance(found, Html) else None

    async def _request(self, known: Page, request: Request, user: User) -> PageRequest:
        made = self._without_time(known, request, user)
        return replace(made, now=await made.call.now())

    def _without_time(self, known: Page, request: Request, user: User) -> PageRequest:
        request.state.notices = self.notices
        base = f"{request.url.scheme}://{request.url.netloc}{root_of(request)}"
        return PageRequest(
            request,
            self.service.call(user, base),
            known,
            actions=self.actions,
            notice=self.notices.take(request),
            paused=request.cookies.get(PAUSE_COOKIE) == "paused",
            signs_out=self.sessions is not None,
        )

    def ask_to_sign_in(self, request: Request) -> Response:
        """Return the response for a user who has not signed in."""
        if self.sessions is None:
            raise Problem(401, "not-signed-in", "sign in to the application that serves this dashboard, and try again")
        target = request.url.path.removeprefix(root_of(request)) if request.method == "GET" else "/"
        if request.url.query and request.method == "GET":
            target += f"?{request.url.query}"
        if "text/event-stream" in request.headers.get("accept", ""):
            raise Problem(401, "not-signed-in", "the session has ended: sign in again")
        return RedirectResponse(f"{root_of(request)}/sign-in?next={quote(target, safe='')}", 303)

    async def sign_in(self, request: Request) -> Response:
        """Show the form of the sign-in, or start a session."""
        if self.sessions is None:
            raise Problem(404, "no-sign-in", "this dashboard takes its users from the application that serves it")
        target = _own_path(request.query_params.get("next", "/"))
        if request.method == "GET":
            return self._sign_in_page(request, "")
        given = parse_form(await read_bytes(request, _MAX_TOKEN_FORM))
        response = RedirectResponse(f"{root_of(request)}{target}", 303)
        if self.sessions.start(response, request, given.get("token", [""])[-1]) is None:
            logger.info("a sign-in with an unknown token was refused")
            return self._sign_in_page(request, "This token is not known.", 403)
        return response

    def _sign_in_page(self, request: Request, problem: str, status: int = 200) -> Response:
        return HTMLResponse(render("sign_in.html", root_of(request), {"problem": problem}), status)

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        response = RedirectResponse(f"{root_of(request)}/sign-in", 303)
        end_session(response, request)
        return response

    async def switch_updates(self, request: Request) -> Response:
        """Pause the updates of pages, or resume them."""
        given = parse_form(await read_bytes(request, _MAX_TOKEN_FORM))
        response = RedirectResponse(f"{root_of(request)}{_own_path(given.get('next', ['/'])[-1])}", 303)
        if given.get("updates") == ["paused"]:
            response.set_cookie(PAUSE_COOKIE, "paused", max_age=_PAUSED, **attributes(request))
        else:
            response.delete_cookie(PAUSE_COOKIE, **attributes(request))
        return response

    async def show_problem(self, request: Request, problem: Problem) -> Response:
        """Return the page of a problem, with the navigation if the user is known."""
        values: dict[str, Any] = {"problem": problem.view()}
        user = None
        if problem.kind != "unknown-host":
            try:
                user = await self.user_of(request)
            except Problem as unknown:
                problem = unknown
        if user is None or problem.kind == "app-not-open":
            return HTMLResponse(render("problem.html", root_of(request), values), problem.status, problem.headers)
        made = self._without_time(_PROBLEM_PAGE, request, user)
        return HTMLResponse(made.render("problem.html", **values).text, problem.status, problem.headers)

    async def not_routed(self, request: Request, error: Exception) -> Response:
        """Return the page of a path or method that the dashboard does not have."""
        try:
            check_host(request, self.hosts)
        except Problem as problem:
            return await self.show_problem(request, problem)
        status = error.status_code if isinstance(error, HTTPException) else 500
        path = request.url.path.removeprefix(root_of(request))
        detail = f"{path[:200]} does not take {request.method}" if status == 405 else f"there is no page {path[:200]}"
        return await self.show_problem(request, Problem(status, "no-such-page", detail))


_PAUSED: Final = 30 * 86_400
"""Seconds for which the browser remembers that updates are paused."""


async def _no_page(_: PageRequest) -> Html:
    raise NotImplementedError


_PROBLEM_PAGE: Final = Page("problem", "", "Problem", "", (), False, False, _no_page)


def _own_path(path: str) -> str:
    """Return a path of this dashboard; the overview for an address of another host, which a link may name."""
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if plain and "\\" not in path else "/"


def problem_from(error: Exception, request: Request) -> Problem:
    """Return the problem of any error. An unexpected one is logged, and its text is not shown: it may hold data."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, PerdureError):
        return problem_of(error)
    if isinstance(error, ValidationError):
        return invalid(error.errors(include_url=False, include_context=False, include_input=False))
    logger.opt(exception=error).error("{} {} failed: {}", request.method, request.url.path, type(error).__name__)
    return Problem(500, "server-error", "the server failed; its log has the traceback", source="server")
