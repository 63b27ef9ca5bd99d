"""Connections with TLS that read their certificates each time they connect.

The client library makes the SSL context once for each asynchronous connection object, which lives as long as its pool
or client. With that context, no connection would succeed after a certificate, key or authority was renewed in its file
and the server accepts only the new one. (Synchronous connections of the library make a context each time.)
"""

from __future__ import annotations

import redis.asyncio


class TlsConnection(redis.asyncio.SSLConnection):
    """A connection with TLS whose context is made from the files at each connect."""

    async def _connect(self) -> None:
        self.ssl_context.context = None
        await super()._connect()  # type: ignore[no-untyped-call]
