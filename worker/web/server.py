"""The server of the API and of the dashboard: uvicorn on one address, until a signal ends it."""

from __future__ import annotations

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
    return uvicorn.Server(config)
