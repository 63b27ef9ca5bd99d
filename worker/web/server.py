"""The server of the API and of the dashboard: uvicorn on one address, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

GRACE = 10
"""Seconds that open requests have when the server stops; event streams end at once."""


HEADERS_TIMEOUT = 20.0
"""Seconds within which a client must send the headers of a request."""


class _Protocol(H11Protocol):
    """HTTP that closes the connection of a client which sends no complete headers in time.

    Such connections count against the number that the server takes, and need no token.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Start the time if headers are expected, and stop it if a request runs."""
        running: RequestResponseCycle | None = self.cycle  # None before the first request
        if running is not None and not running.response_complete:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_TIMEOUT, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def make_server(
    application: Any, host: str, port: int, *, root_path: str = "", proxies: str | None = None
) -> uvicorn.Server:
    """Return a server of an ASGI application.

    Args:
        root_path: Path under which a proxy serves it.
        proxies: Addresses of proxies whose `X-Forwarded-*` headers count, separated by commas. Default: loopback.
    """
    config = uvicorn.Config(
        application,
        http=_Protocol,
        host=host,
        port=port,
        root_path=root_path,
        forwarded_allow_ips=proxies,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=1000,
        lifespan="on",
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Server that SIGTERM ends as it should, so that the process exits with 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # those that are left are raised again
            self._captured_signals[:] = [number for number in self._captured_signals if number != signal.SIGTERM]
