"""The server: clients that send no complete request."""

from __future__ import annotations

import asyncio
import socket

import pytest
from perdure.worker.web import server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.workers import bounded

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("served", "part"), [(False, b""), (False, b"GET / HT"), (False, REQUEST[:-2]), (True, b"GET / HT")], ids=str
)
async def test_a_connection_without_complete_headers_is_closed(
    part: bytes, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADERS_TIMEOUT", 0.1)

    async def slow(_: Request) -> PlainTextResponse:
        await asyncio.sleep(0.2)  # longer than headers may take
        return PlainTextResponse("served")

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    made = server.make_server(Starlette(routes=[Route("/", slow)]), "127.0.0.1", 0)
    serving = asyncio.create_task(made._serve([listener]))
    try:
        reader, writer = await bounded(_connect(listener))
        if served:
            writer.write(REQUEST)
            assert (await bounded(reader.readuntil(b"served"))).startswith(b"HTTP/1.1 200 OK")
        writer.write(part)
        assert await bounded(reader.read()) == b"", "the connection is closed"
        writer.close()
    finally:
        made.should_exit = made.force_exit = True
        await bounded(serving)


async def _connect(listener: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(*listener.getsockname())
        except ConnectionRefusedError:  # it does not listen yet
            await asyncio.sleep(0.01)
