"""The server of the API and of the dashboard: uvicorn on one address, until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import uvicorn

GRACE = 10
"""Seconds that open requests have when the server stops; event streams end at once."""


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
