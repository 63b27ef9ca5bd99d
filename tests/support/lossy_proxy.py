"""Proxy to a real server that loses replies: the server runs the command, and the client gets no answer."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from perdure.queues import Address, Gateway, Namespace

from tests.support.task_places import dump

PATIENCE = 10.0


class LossyProxy:
    """Proxy between unix sockets. `lose(text)` breaks the connection instead of returning the reply to such a command.

    `hold(text)` breaks it instead of sending such a command, and keeps its bytes until `deliver`.
    While `flowing` is cleared, connections stay open and no data passes. `hang` stops the present connections for good,
    without closing them. `delay`: seconds by which each reply is delayed.
    """

    def __init__(self, server: Path, path: Path) -> None:
        self._server = server
        self.path = path
        self._wanted: bytes | None = None
        self.lost = 0
        self._held: bytes | None = None
        self.late = b""
        self.accepted = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.delay = 0.0
        self._hung_there: set[asyncio.StreamWriter] = set()
        self._hung_back: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()

    def hang(self, *, there: bool = True, back: bool = True) -> int:
        """Carry nothing more on the connections that stand now: there (to the server), back, or both ways.

        Returns how many they are.
        """
        self._hung_there |= self._open if there else set()
        self._hung_back |= self._open if back else set()
        return len(self._open)

    def lose(self, text: bytes) -> None:
        self._wanted = text

    def hold(self, text: bytes) -> None:
        self._held = text

    async def deliver(self) -> None:
        """Send the bytes that were held back, and wait until the server has carried them out."""
        answers, upstream = await asyncio.open_unix_connection(self._server)
        upstream.write(self.late + b"PING\r\n")
        await answers.readuntil(b"+PONG\r\n")
        await _close(upstream)

    @asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """Break every connection, and refuse new ones until the block ends."""
        assert self._listener is not None
        self._listener.close()
        await self._break()
        try:
            yield
        finally:
            self._listener = await asyncio.start_unix_server(self._accept, self.path)

    async def _break(self) -> None:
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LossyProxy]:
        self._listener = await asyncio.start_unix_server(self._accept, self.path)
        try:
            yield self
        finally:
            self._listener.close()
            await self._break()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        pump = asyncio.create_task(self._serve(reader, writer))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        pump.add_done_callback(lambda _: writer.close())  # a pump that is cancelled before it began closes nothing

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_close, writer)
            try:
                answers, upstream = await asyncio.open_unix_connection(self._server)
            except OSError:
                return  # the server is away
            self._open.add(writer)
            stack.callback(self._open.discard, writer)
            stack.push_async_callback(_close, upstream)
            doomed = asyncio.Event()
            both = [
                asyncio.create_task(self._carry(reader, upstream, doomed, writer)),
                asyncio.create_task(self._carry_back(answers, writer, doomed)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        doomed: asyncio.Event,
        back: asyncio.StreamWriter,
    ) -> None:
        while data := await reader.read(65536):
            if self._wanted is not None and self._wanted in data:
                self._wanted = None
                doomed.set()
            if self._held is not None and self._held in data:
                self._held = None
                while not _whole(data):
                    data += await reader.read(65536)
                self.late = data
                return
            await self.flowing.wait()
            if back not in self._hung_there:
                upstream.write(data)

    async def _carry_back(
        self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await answers.read(65536):
            if doomed.is_set():
                self.lost += 1
                return
            if self.delay:
                await asyncio.sleep(self.delay)
            if writer not in self._hung_back:
                writer.write(data)


def _whole(data: bytes) -> bool:
    """Return whether the data ends with the end of a command."""
    at = 0
    while at < len(data):
        end = data.find(b"\r\n", at)
        if end < 0:
            return False
        parts, at = int(data[at + 1 : end]), end + 2
        for _ in range(parts):
            end = data.find(b"\r\n", at)
            if end < 0:
                return False
            at = end + 4 + int(data[at + 1 : end])
    return at == len(data)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def deliver_unchanged(gateway: Gateway, namespace: Namespace, proxy: LossyProxy) -> None:
    """Deliver the late bytes, and check that nothing has changed."""
    before = await dump(gateway, namespace)
    assert proxy.late
    await proxy.deliver()
    assert await dump(gateway, namespace) == before


@asynccontextmanager
async def lossy_gateway(gateway: Gateway) -> AsyncIterator[tuple[Gateway, LossyProxy]]:
    """Open a second gateway to the same server, over a proxy that loses replies on request."""
    await gateway.load_scripts()  # else the reply that gets lost is that the script is not known
    folder = Path(tempfile.mkdtemp(prefix="perdure-line-"))
    server = Path(gateway.address.url.removeprefix("unix://"))
    try:
        async with LossyProxy(server, folder / "line.sock").open() as line:
            lossy = Gateway(Address(f"unix://{line.path}"), patience=PATIENCE)
            await lossy.open()
            try:
                yield lossy, line
            finally:
                await lossy.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
