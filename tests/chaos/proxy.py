"""TCP proxy between a worker and the server that can hold, delay, break and withhold what passes through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

__all__ = ["HOST", "Proxy"]

HOST = "127.0.0.1"


class Proxy:
    """Forwards bytes between its own port and the socket of the server."""

    def __init__(self, server: Path) -> None:
        """server: socket of the server."""
        self._server = server
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay = 0.0
        self._withholding = False
        self._withheld: dict[asyncio.StreamWriter, list[bytes]] = {}
        self._carriers: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://{HOST}:{self._listener.sockets[0].getsockname()[1]}"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Proxy]:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        try:
            yield self
        finally:
            self._listener.close()
            await self.cut()
            await self.deliver_late()

    def hold(self) -> None:
        """Accept connections, but forward nothing."""
        self._flowing.clear()

    def slow(self, seconds: float) -> None:
        """Delay every chunk by so many seconds."""
        self._delay = seconds

    def withhold(self) -> None:
        """Keep what clients send from now on; the server does not get it before `deliver_late`."""
        self._withholding = True

    async def cut_withheld(self) -> None:
        """Break the connections of the clients, so that they send again on new ones; keep what was withheld."""
        self._withholding = False
        await self.cut()

    async def deliver_late(self) -> int:
        """Deliver what was withheld, each on its old connection to the server. Return the number of bytes."""
        withheld, self._withheld = self._withheld, {}
        delivered = 0
        for upstream, chunks in withheld.items():
            with suppress(OSError):
                upstream.writelines(chunks)
                await upstream.drain()
                delivered += sum(map(len, chunks))
                upstream.write_eof()
            upstream.close()
        return delivered

    def heal(self) -> None:
        self._delay = 0.0
        self._flowing.set()

    async def cut(self) -> None:
        """Break every connection."""
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
            answers, upstream = await asyncio.open_unix_connection(self._server)
            both = [
                asyncio.create_task(self._carry(reader, upstream, from_client=True)),
                asyncio.create_task(self._carry(answers, writer)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.gather(*both, return_exceptions=True)
                if upstream not in self._withheld:
                    upstream.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool = False
    ) -> None:
        while data := await reader.read(65536):
            if from_client and (self._withholding or writer in self._withheld):
                self._withheld.setdefault(writer, []).append(data)
                continue
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
