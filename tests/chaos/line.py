"""A worker's line to the server: a TCP proxy that can be held half-open, slowed down, or broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

__all__ = ["HOST", "Line"]

HOST = "127.0.0.1"


class Line:
    """Carries bytes both ways between a port of its own and the server's."""

    def __init__(self, server: int) -> None:
        """server: its port."""
        self._server = server
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay = 0.0
        self._carriers: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://{HOST}:{self._listener.sockets[0].getsockname()[1]}"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Line]:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        try:
            yield self
        finally:
            self._listener.close()
            await self.cut()

    def hold(self) -> None:
        """Half-open: connections stand, new ones are taken, and nothing goes through."""
        self._flowing.clear()

    def slow(self, seconds: float) -> None:
        """Let every piece wait so long."""
        self._delay = seconds

    def heal(self) -> None:
        self._delay = 0.0
        self._flowing.set()

    async def cut(self) -> None:
        """Break every connection that there is."""
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrier = asyncio.create_task(self._serve(reader, writer))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        carrier.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await self._flowing.wait()
            answers, upstream = await asyncio.open_connection(HOST, self._server)
            both = [
                asyncio.create_task(self._carry(reader, upstream)),
                asyncio.create_task(self._carry(answers, writer)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.gather(*both, return_exceptions=True)
                upstream.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
