"""The wire: what is submitted in a tick goes out together, every reply finds its caller, and what breaks says so.

The server here says byte by byte what a test has it say; that the wire understands a real one, all others show.
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
from perdure.queues.transport import pipelining as wires
from perdure.queues.transport.clients import pipelined_connection
from perdure.queues.transport.pipelining import PipelinedConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as ReplyTimeout

BOUND = 10.0


class Server:
    """Takes connections; a test reads what came and says what is answered."""

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

    async def heard(self) -> list[list[bytes]]:
        """The commands that came together."""
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


def connect(server: Server, timeout: float = BOUND) -> PipelinedConnection:
    return PipelinedConnection(pipelined_connection(Address(f"unix://{server.path}"), None), timeout)


@pytest.fixture
async def wire(server: Server) -> AsyncIterator[PipelinedConnection]:
    wire = connect(server)
    yield wire
    await wire.close()


async def standing(server: Server, wire: PipelinedConnection) -> None:
    """The connection stands, and nothing is under way."""
    ping = wire.submit(("PING",))
    assert await server.heard() == [[b"PING"]]
    server.say(b"+PONG\r\n")
    assert await asyncio.wait_for(ping, BOUND) == b"PONG"


async def test_what_is_submitted_in_one_tick_comes_together_and_in_order(
    server: Server, wire: PipelinedConnection
) -> None:
    await standing(server, wire)
    futures = [wire.submit(("ECHO", str(number))) for number in range(5)]
    assert await server.heard() == [[b"ECHO", str(number).encode()] for number in range(5)]
    server.say(b"".join(b":%d\r\n" % number for number in range(5)))
    assert [await future for future in futures] == list(range(5))


async def test_many_go_out_before_the_tick_has_ended(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    futures = [wire.submit(("ECHO", str(number))) for number in range(wires._ENOUGH)]
    assert not wire._outbox
    await server.heard()
    server.say(b"".join(b":%d\r\n" % number for number in range(wires._ENOUGH)))
    assert [await future for future in futures] == list(range(wires._ENOUGH))


async def test_flushed_it_waits_for_no_more(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    future = wire.submit(("A",))
    wire.flush()
    assert not wire._outbox
    await server.heard()
    server.say(b"+a\r\n")
    assert await future == b"a"


async def test_nobody_waits_for_the_replies_of_others(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    slow = wire.submit(("SLOW",))
    assert await server.heard() == [[b"SLOW"]]
    other = wire.submit(("OTHER",))
    assert await server.heard() == [[b"OTHER"]]  # though SLOW is not answered
    server.say(b"+slow\r\n+other\r\n")
    assert [await slow, await other] == [b"slow", b"other"]


async def test_an_error_reaches_the_caller_whose_command_failed(server: Server, wire: PipelinedConnection) -> None:
    first, second, third = (wire.submit((name,)) for name in "ABC")
    await server.heard()
    server.say(b"+a\r\n-WRONGTYPE no\r\n+c\r\n")
    assert await first == b"a"
    with pytest.raises(ResponseError, match="no"):
        await second
    assert await third == b"c"


async def test_a_caller_who_gave_up_takes_back_what_has_not_gone_out(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    first, second = wire.submit(("A",)), wire.submit(("B",))
    first.cancel()
    assert await server.heard() == [[b"B"]]
    server.say(b"+b\r\n")
    assert await second == b"b"


async def test_the_reply_to_a_caller_who_gave_up_later_goes_to_nobody_else(
    server: Server, wire: PipelinedConnection
) -> None:
    first, second = wire.submit(("A",)), wire.submit(("B",))
    await server.heard()
    first.cancel()
    server.say(b"+a\r\n+b\r\n")
    assert await second == b"b"


async def test_a_reply_in_pieces_is_put_together(server: Server, wire: PipelinedConnection) -> None:
    future = wire.submit(("A",))
    await server.heard()
    for piece in (b"*2\r\n$5\r\nhe", b"llo\r", b"\n:1", b"7\r\n"):
        server.say(piece)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(future, BOUND) == [b"hello", 17]


async def test_a_lost_connection_fails_what_went_out_and_what_comes_later_has_another(
    server: Server, wire: PipelinedConnection
) -> None:
    futures = [wire.submit(("A",)), wire.submit(("B",))]
    await server.heard()
    server.hang_up()
    for future in futures:
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(future, BOUND)
    await standing(server, wire)
    assert server.connections == 2


async def test_each_caller_has_an_error_of_its_own(server: Server, wire: PipelinedConnection) -> None:
    futures = [wire.submit(("A",)), wire.submit(("B",))]
    await server.heard()
    server.hang_up()
    await asyncio.wait(futures, timeout=BOUND)
    first, second = (future.exception() for future in futures)
    assert first is not second


async def test_a_silent_server_is_given_up(server: Server) -> None:
    wire = connect(server, timeout=0.05)
    future = wire.submit(("A",))
    with pytest.raises(ReplyTimeout, match=r"no reply within 0\.05 s"):
        await asyncio.wait_for(future, BOUND)
    await wire.close()


async def test_a_server_that_says_something_now_and_then_is_not(server: Server) -> None:
    """The limit is on silence: behind a long reply others may wait longer."""
    wire = connect(server, timeout=0.2)
    future = wire.submit(("A",))
    await server.heard()
    server.say(b"$40\r\n")
    for _ in range(8):
        await asyncio.sleep(0.05)
        server.say(b"xxxxx")
    server.say(b"\r\n")
    assert await asyncio.wait_for(future, BOUND) == b"x" * 40
    await wire.close()


async def test_what_is_no_reply_ends_the_connection(server: Server, wire: PipelinedConnection) -> None:
    future = wire.submit(("A",))
    await server.heard()
    server.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectionLost, match="not of its protocol"):
        await asyncio.wait_for(future, BOUND)
    await standing(server, wire)


async def test_a_reply_that_nobody_asked_for_ends_the_connection(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    server.say(b"+surplus\r\n")
    await asyncio.sleep(0.01)
    await standing(server, wire)
    assert server.connections == 2


async def test_no_more_go_out_than_may_be_unanswered(
    server: Server, wire: PipelinedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "_MOST_UNANSWERED", 3)
    await standing(server, wire)
    futures = [wire.submit((name,)) for name in "ABCDE"]
    assert await server.heard() == [[b"A"], [b"B"], [b"C"]]
    server.say(b"+a\r\n")
    assert await server.heard() == [[b"D"]]
    futures[4].cancel()
    server.say(b"+b\r\n+c\r\n+d\r\n")
    assert await asyncio.gather(*futures[:4]) == [b"a", b"b", b"c", b"d"]
    await standing(server, wire)


async def test_renewed_it_goes_on_on_another_connection(server: Server, wire: PipelinedConnection) -> None:
    await standing(server, wire)
    wire.reconnect()
    await standing(server, wire)
    assert server.connections == 2


async def test_a_server_that_is_not_there_fails_what_was_submitted(tmp_path: Path) -> None:
    wire = connect(Server(tmp_path / "nobody"))
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(wire.submit(("A",)), BOUND)
    await wire.close()


async def test_closed_it_answers_everybody(server: Server, wire: PipelinedConnection) -> None:
    under_way = wire.submit(("A",))
    await server.heard()
    waiting = wire.submit(("B",))
    await wire.close()
    for future in (under_way, waiting, wire.submit(("C",))):
        with pytest.raises(ConnectionLost, match="closed"):
            await future
