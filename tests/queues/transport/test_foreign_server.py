"""Servers that are no Redis server, or speak TLS where the URL says otherwise: named soon, with the remedy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from perdure.queues import Address, Gateway, Refused, Unavailable

Answer = Callable[[bytes], bytes]

SOON = 3.0
"""Seconds within which the user must know."""


@asynccontextmanager
async def server(answer: Answer, *, needs: bytes = b"") -> AsyncIterator[int]:
    """Run a server, and return its port. needs: what it waits for before it answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        asked = b""
        with suppress(OSError):
            while (not asked or needs not in asked) and (more := await reader.read(1024)):
                asked += more
            writer.write(answer(asked))
            await reader.read()
        writer.close()

    serving = set[asyncio.Task[None] | None]()
    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]
        await asyncio.gather(*filter(None, serving))  # each client has left


async def refused(url: str) -> str:
    gateway = Gateway(Address.parse(url, data_dir=lambda: pytest.fail("no folder is needed")))
    began = time.monotonic()
    with pytest.raises(Refused) as raised:
        await gateway.open()
    assert time.monotonic() - began < SOON
    return str(raised.value)


def http(asked: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("needs", [b"", b"\r\n\r\n"], ids=["hasty", "patient"])
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_port_that_speaks_http_is_named(scheme: str, needs: bytes) -> None:
    async with server(http, needs=needs) as port:
        url = f"{scheme}://:secret@127.0.0.1:{port}"
        assert await refused(url) == (
            f"{scheme}://:***@127.0.0.1:{port} speaks HTTP, not Redis: give the port of the Redis server"
        )


async def test_another_protocol_is_shown() -> None:
    async with server(lambda asked: b"SSH-2.0-OpenSSH_9.9\r\n", needs=b"PING\r\n\r\n") as port:
        assert "does not speak Redis (it answers b'SSH-2.0-OpenSSH_9.9" in await refused(f"redis://127.0.0.1:{port}")


async def test_a_plain_port_with_a_url_for_tls() -> None:
    async with server(lambda asked: b"-NOAUTH Authentication required.\r\n", needs=b"\r\n") as port:
        text = await refused(f"rediss://127.0.0.1:{port}/0")
    assert text == f"rediss://127.0.0.1:{port}/0 speaks Redis without TLS: write redis://"


async def test_a_port_with_tls_and_a_plain_url() -> None:
    async with server(lambda asked: b"\x15\x03\x01\x00\x02\x02\x46") as port:
        assert await refused(f"redis://127.0.0.1:{port}") == f"redis://127.0.0.1:{port} speaks TLS: write rediss://"


async def test_a_server_that_only_is_slow_is_not_taken_for_another(redis_url: str) -> None:
    answered = asyncio.Event()

    async def wait(call: Callable[[], Awaitable[None]]) -> None:
        await answered.wait()
        await call()

    gateway = Gateway(Address.parse(redis_url, data_dir=lambda: pytest.fail("no folder is needed")))
    gateway._repeat = wait  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(1.5 * gateway.timings.suspicious, answered.set)
    await gateway.open()
    assert await gateway.command("PING") == b"PONG"
    await gateway.close()


async def test_an_unreachable_server_has_a_remedy() -> None:
    gateway = Gateway(Address("redis://:secret@127.0.0.1:1"), patience=0.1)
    with pytest.raises(Unavailable) as raised:
        await gateway.open()
    error = raised.value
    remedy = "start the server, or name another one with PERDURE_REDIS_URL (or --redis-url of a command)"
    assert str(error) == f"{error.problem}; {remedy}"
    assert error.problem.startswith("cannot reach Redis at redis://:***@127.0.0.1:1: ")
    assert not error.problem.endswith(".")
