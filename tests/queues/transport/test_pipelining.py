"""The pipelined connection: commands of one tick share a write, replies reach their callers, losses fail commands.

The server of these tests sends the bytes of a script; other tests use real servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hiredis
import pytest
from perdure.queues import Address
from perdure.queues.transport.clients import pipelined_connection
from perdure.queues.transport.pipelining import PipelinedConnection, PipelineLimits
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as ReplyTimeout

BOUND = 30.0
LIMITS = PipelineLimits()


class Server:
    """A scripted server: the test reads the commands and sends the replies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.chunks: asyncio.Queue[list[list[bytes]]] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self.connections += 1
        self._writer = writer
        parser = hiredis.Reader()
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                parser.feed(data)
                commands = []
                while (command := parser.gets()) is not False:
                    if command[0] == b"CLIENT":  # the handshake
                        self.say(b"+OK\r\n")
                    else:
                        commands.append(command)
                if commands:
                    self.chunks.put_nowait(commands)
        writer.close()

    async def received(self) -> list[list[bytes]]:
        """Return the commands of one read."""
        return await asyncio.wait_for(self.chunks.get(), BOUND)

    def say(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def hang_up(self) -> None:
        assert self._writer is not None
        self._writer.transport.abort()

    async def stop(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "s")
    listener = await asyncio.start_unix_server(server.accept, server.path)
    yield server
    listener.close()
    await server.stop()


def connect(server: Server, timeout: float = BOUND, limits: PipelineLimits = LIMITS) -> PipelinedConnection:
    return PipelinedConnection(pipelined_connection(Address(f"unix://{server.path}"), None), timeout, limits)


@pytest.fixture
async def connection(server: Server) -> AsyncIterator[PipelinedConnection]:
    connection = connect(server)
    yield connection
    await connection.close()


async def connected(server: Server, connection: PipelinedConnection) -> None:
    """Connect, and wait until no command is outstanding."""
    ping = connection.submit(("PING",))
    assert await server.received() == [[b"PING"]]
    server.say(b"+PONG\r\n")
    assert await asyncio.wait_for(ping, BOUND) == b"PONG"


async def test_commands_of_one_tick_are_written_together_and_in_order(
    server: Server, connection: PipelinedConnection
) -> None:
    await connected(server, connection)
    futures = [connection.submit(("ECHO", str(number))) for number in range(5)]
    assert await server.received() == [[b"ECHO", str(number).encode()] for number in range(5)]
    server.say(b"".join(b":%d\r\n" % number for number in range(5)))
    assert [await future for future in futures] == list(range(5))


async def test_a_full_outbox_is_written_before_the_tick_ends(server: Server, connection: PipelinedConnection) -> None:
    await connected(server, connection)
    futures = [connection.submit(("ECHO", str(number))) for number in range(LIMITS.early_write)]
    assert not connection._outbox
    await server.received()
    server.say(b"".join(b":%d\r\n" % number for number in range(LIMITS.early_write)))
    assert [await future for future in futures] == list(range(LIMITS.early_write))


async def test_flush_writes_the_outbox_at_once(server: Server, connection: PipelinedConnection) -> None:
    await connected(server, connection)
    future = connection.submit(("A",))
    connection.flush()
    assert not connection._outbox
    await server.received()
    server.say(b"+a\r\n")
    assert await future == b"a"


async def test_a_command_is_written_while_replies_are_outstanding(
    server: Server, connection: PipelinedConnection
) -> None:
    await connected(server, connection)
    slow = connection.submit(("SLOW",))
    assert await server.received() == [[b"SLOW"]]
    other = connection.submit(("OTHER",))
    assert await server.received() == [[b"OTHER"]]  # the reply to SLOW is outstanding
    server.say(b"+slow\r\n+other\r\n")
    assert [await slow, await other] == [b"slow", b"other"]


async def test_an_error_reaches_the_caller_whose_command_failed(
    server: Server, connection: PipelinedConnection
) -> None:
    first, second, third = (connection.submit((name,)) for name in "ABC")
    await server.received()
    server.say(b"+a\r\n-WRONGTYPE no\r\n+c\r\n")
    assert await first == b"a"
    with pytest.raises(ResponseError, match="no"):
        await second
    assert await third == b"c"


async def test_a_cancelled_caller_withdraws_an_unwritten_command(
    server: Server, connection: PipelinedConnection
) -> None:
    await connected(server, connection)
    first, second = connection.submit(("A",)), connection.submit(("B",))
    first.cancel()
    assert await server.received() == [[b"B"]]
    server.say(b"+b\r\n")
    assert await second == b"b"


async def test_the_reply_to_a_cancelled_caller_reaches_no_other_caller(
    server: Server, connection: PipelinedConnection
) -> None:
    first, second = connection.submit(("A",)), connection.submit(("B",))
    await server.received()
    first.cancel()
    server.say(b"+a\r\n+b\r\n")
    assert await second == b"b"


async def test_a_fragmented_reply_is_assembled(server: Server, connection: PipelinedConnection) -> None:
    future = connection.submit(("A",))
    await server.received()
    for piece in (b"*2\r\n$5\r\nhe", b"llo\r", b"\n:1", b"7\r\n"):
        server.say(piece)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(future, BOUND) == [b"hello", 17]


async def test_a_lost_connection_fails_sent_commands_and_later_commands_use_another(
    server: Server, connection: PipelinedConnection
) -> None:
    futures = [connection.submit(("A",)), connection.submit(("B",))]
    await server.received()
    server.hang_up()
    for future in futures:
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(future, BOUND)
    await connected(server, connection)
    assert server.connections == 2


@pytest.mark.parametrize("end", ["end of file", "reset"])
async def test_a_connection_that_ends_with_its_handshake_fails_at_once(
    server: Server, connection: PipelinedConnection, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library learns of its end before this connection takes its transport over."""
    library: Any = connection._connection
    connect = library.connect

    async def connect_and_lose() -> None:
        await connect()
        if end == "reset":
            library._writer.transport.abort()
        else:
            server.hang_up()
        await asyncio.wait_for(library._reader.read(), BOUND)

    monkeypatch.setattr(library, "connect", connect_and_lose)
    with pytest.raises(ConnectionLost, match="closed the connection"):
        await asyncio.wait_for(connection.submit(("PING",)), 5.0)
    monkeypatch.undo()
    later = connection.submit(("PING",))
    assert await server.received() == [[b"PING"]]
    server.say(b"+PONG\r\n")
    assert await later == b"PONG"


async def test_each_caller_gets_a_separate_exception(server: Server, connection: PipelinedConnection) -> None:
    futures = [connection.submit(("A",)), connection.submit(("B",))]
    await server.received()
    server.hang_up()
    await asyncio.wait(futures, timeout=BOUND)
    first, second = (future.exception() for future in futures)
    assert first is not second


async def test_a_silent_server_closes_the_connection(server: Server) -> None:
    connection = connect(server, timeout=0.05)
    future = connection.submit(("A",))
    with pytest.raises(ReplyTimeout, match=r"no reply within 0\.05 s"):
        await asyncio.wait_for(future, BOUND)
    await connection.close()


async def test_a_slow_server_keeps_the_connection(server: Server) -> None:
    """The limit applies to silence: commands behind a long reply may wait longer."""
    connection = connect(server, timeout=0.2)
    future = connection.submit(("A",))
    await server.received()
    server.say(b"$40\r\n")
    for _ in range(8):
        await asyncio.sleep(0.05)
        server.say(b"xxxxx")
    server.say(b"\r\n")
    assert await asyncio.wait_for(future, BOUND) == b"x" * 40
    await connection.close()


async def test_an_invalid_reply_closes_the_connection(server: Server, connection: PipelinedConnection) -> None:
    future = connection.submit(("A",))
    await server.received()
    server.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectionLost, match="could not parse the server's reply"):
        await asyncio.wait_for(future, BOUND)
    await connected(server, connection)


async def test_a_surplus_reply_closes_the_connection(server: Server, connection: PipelinedConnection) -> None:
    await connected(server, connection)
    server.say(b"+surplus\r\n")
    await asyncio.sleep(0.01)
    await connected(server, connection)
    assert server.connections == 2


async def test_written_commands_without_reply_are_limited(
    server: Server,
) -> None:
    connection = connect(server, limits=PipelineLimits(unanswered=3))
    await connected(server, connection)
    futures = [connection.submit((name,)) for name in "ABCDE"]
    assert await server.received() == [[b"A"], [b"B"], [b"C"]]
    server.say(b"+a\r\n")
    assert await server.received() == [[b"D"]]
    futures[4].cancel()
    server.say(b"+b\r\n+c\r\n+d\r\n")
    assert await asyncio.gather(*futures[:4]) == [b"a", b"b", b"c", b"d"]
    await connected(server, connection)
    await connection.close()


async def test_after_reconnect_commands_use_another_connection(server: Server, connection: PipelinedConnection) -> None:
    await connected(server, connection)
    connection.reconnect()
    await connected(server, connection)
    assert server.connections == 2


async def test_commands_fail_if_the_server_is_unreachable(tmp_path: Path) -> None:
    connection = connect(Server(tmp_path / "missing"))
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(connection.submit(("A",)), BOUND)
    await connection.close()


async def test_close_fails_all_outstanding_commands(server: Server, connection: PipelinedConnection) -> None:
    outstanding = connection.submit(("A",))
    await server.received()
    waiting = connection.submit(("B",))
    await connection.close()
    for future in (outstanding, waiting, connection.submit(("C",))):
        with pytest.raises(ConnectionLost, match="closed"):
            await future
