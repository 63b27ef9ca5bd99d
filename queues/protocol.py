"""Replies of protocol 3 in the shape of protocol 2: maps as flat lists, numbers with a fraction as text.

Whoever awaits a reply need not know which of the two the connection speaks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .wire import Command, Wire

__all__ = ["PlainWire", "plain"]


def plain(command: Command, reply: Any) -> Any:
    """A reply to `command` as protocol 2 gives it."""
    if isinstance(reply, dict) and str(command[0]).upper() in ("XREADGROUP", "XREAD"):
        return [[stream, _plain(entries)] for stream, entries in reply.items()]
    return _plain(reply)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [_plain(part) for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return f"{value:.17g}".encode()
    return value


class PlainWire:
    """A wire that speaks protocol 3, for callers who expect the replies of protocol 2."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def submit(self, command: Command) -> asyncio.Future[Any]:
        inner = self._wire.submit(command)
        outer: asyncio.Future[Any] = inner.get_loop().create_future()

        def answered(inner: asyncio.Future[Any]) -> None:
            if inner.cancelled():
                outer.cancel()
                return
            error = inner.exception()
            if outer.done():
                return
            if error is None:
                outer.set_result(plain(command, inner.result()))
            else:
                outer.set_exception(error)

        def given_up(outer: asyncio.Future[Any]) -> None:
            if outer.cancelled():
                inner.cancel()

        inner.add_done_callback(answered)
        outer.add_done_callback(given_up)
        return outer

    def flush(self) -> None:
        self._wire.flush()

    def renew(self) -> None:
        self._wire.renew()

    async def close(self) -> None:
        await self._wire.close()
