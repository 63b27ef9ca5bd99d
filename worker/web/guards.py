"""Guards of pages in a browser: response headers, the list of hosts, and the origin of requests that change something.

A page of another site can make the browser of a user send requests, with the user's cookies. The cookies of the
dashboard are SameSite=Strict; apart from that, a request that changes something must come from a page of the same
origin. A site can also let its own name point to this machine (DNS rebinding): requests must name a known host, or an
address, which no site can rebind.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # the origin of a form is needed for the check, so it is not suppressed on pages of the same origin
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of each page and of what it loads."""

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class PageHeaders:
    """ASGI middleware that sets `PAGE_HEADERS`, and lets no response be stored that does not say so itself."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and set the headers of its response."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _set_headers(message)
            await send(message)

        await self._inner(scope, receive, with_headers)


def _set_headers(start: MutableMapping[str, Any]) -> None:
    headers = MutableHeaders(scope=start)
    for name, value in PAGE_HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")


def check_host(request: HTTPConnection, hosts: Collection[str] | None) -> None:
    """Raise `Problem` if a request names a host that is not known. hosts: None for any.

    The names of this machine and addresses are always known.
    """
    if hosts is None:
        return
    host = host_name(request.headers.get("host", ""))
    if host != "localhost" and not host.endswith(".localhost") and not _is_address(host) and host not in hosts:
        raise Problem(
            403,
            "unknown-host",
            f"this address is not served as {host[:200]!r}: allow it with --allow-host {host[:200]}",
        )


def host_name(netloc: str) -> str:
    """Return the host of a Host header in lower case, without the port."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def check_origin(request: HTTPConnection) -> None:
    """Raise `Problem` if a request that may change something does not come from a page of this origin.

    Browsers say so in `Sec-Fetch-Site`, and in `Origin` where the connection is not encrypted.
    """
    if request.scope.get("method") in _SAFE:
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        allowed = site == "same-origin"
    else:
        origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
        allowed = bool(host) and urlsplit_netloc(origin) == host.lower()
    if not allowed:
        raise Problem(
            403, "foreign-origin", "the request must come from a page of this dashboard: open it, and try there"
        )


def check_browser_origin(request: HTTPConnection) -> None:
    """Raise `Problem` if a page of another origin made a browser send a request that may change something.

    A program that is no browser sends neither `Sec-Fetch-Site` nor `Origin`. A request with a bearer token is not
    checked: a browser does not add one by itself.
    """
    if request.scope.get("method") in _SAFE:
        return
    if request.headers.get("authorization", "").partition(" ")[0].lower() == "bearer":
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        allowed = site in ("same-origin", "none")
    else:
        allowed = origin is None or urlsplit_netloc(origin) == request.headers.get("host", "").lower()
    if not allowed:
        raise Problem(
            403,
            "foreign-origin",
            "a page of another origin must not send this request with the cookies of a user: send a bearer token",
        )


def urlsplit_netloc(origin: str) -> str:
    """Return host and port of an Origin header in lower case; empty if it has none, such as `null`."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return ""
    return found.netloc.lower() if found.scheme in ("http", "https") else ""
