"""Recognition of a server that is no Redis server, or that speaks TLS where the address says otherwise."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from ..runtime import RUNTIME
from .address import Address, Node

_LIMIT: Final = 1.0
"""Seconds for each of at most two questions."""

_QUESTION: Final = b"PING\r\n\r\n"
"""An inline command of Redis, and a request that every HTTP server answers."""

_REDIS: Final = b"+-$*:"
"""First bytes of the replies of Redis."""

_TLS_ALERT: Final = b"\x15\x03"


async def recognise(address: Address) -> str | None:
    """Return what the server at an address speaks instead of what the address says, and the remedy.

    None if it speaks that, does not answer, or has no port. Reads a few bytes over connections of its own.
    """
    place = _place(address)
    if place is None or RUNTIME.sync_connection is not None:  # simulated processes have no connections of their own
        return None
    reply = await _ask(place, None)
    if reply.startswith(_TLS_ALERT):
        if not address.encrypted:
            return f"{address.shown} speaks TLS: write {address.scheme.replace('redis', 'rediss', 1)}://"
        reply = await _ask(place, _unverified())
    elif address.encrypted and reply[:1] and reply[:1] in _REDIS:
        return f"{address.shown} speaks Redis without TLS: write {address.scheme.replace('rediss', 'redis', 1)}://"
    elif address.encrypted and not reply:
        reply = await _ask(place, _unverified())  # a server with TLS may close a connection without an alert
    if reply.startswith(b"HTTP/") or b"<html" in reply.lower():
        return f"{address.shown} speaks HTTP, not Redis: give the port of the Redis server"
    if reply and reply[:1] not in _REDIS:
        return f"{address.shown} does not speak Redis (it answers {reply[:20]!r}): give the port of the Redis server"
    return None


def _place(address: Address) -> Node | None:
    if address.embedded or address.scheme == "unix":
        return None
    if address.nodes:
        return address.nodes[0]
    parts = urlsplit(address.url)
    return Node(parts.hostname or "localhost", parts.port or 6379)


async def _ask(place: Node, tls: ssl.SSLContext | None) -> bytes:
    """Return the beginning of the server's answer; empty without one."""
    reply = b""
    with suppress(OSError, TimeoutError, ssl.SSLError):
        async with asyncio.timeout(_LIMIT):
            reader, writer = await asyncio.open_connection(place.host, place.port, ssl=tls)
            try:
                writer.write(_QUESTION)
                reply = await reader.read(256)
            finally:
                writer.transport.abort()
    return reply


def _unverified() -> ssl.SSLContext:
    """Return a context for a connection over which nothing secret is sent, and whose certificate does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
