"""One connection, shared by everybody in this process: what is submitted in one tick goes out in few writes.

Submitting puts a command into the outbox; it is written as a whole at the end of the event loop's tick, or as soon as
it holds enough to keep the server busy meanwhile, without waiting for replies that are still to come. Replies come in
the order of the commands, so each is handed to the future at the head of the line. An error reply reaches the caller
whose command it answers and nobody else; a caller that was cancelled before its command went out takes it back, and one
cancelled later leaves the others alone. When the connection is lost, every command that had gone out fails, since
nobody can tell which were carried out; those that had not gone out yet go out on the next connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import hiredis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as ReplyTimeout

__all__ = ["Argument", "ClientAdapter", "Command", "CommandConnection", "PipelinedConnection"]

Argument = str | bytes | int | float
Command = Sequence[Argument]

_ENOUGH: Final = 8
"""Commands that go out before the tick has ended: the server works on them while this process makes the next ones."""

_MOST_UNANSWERED: Final = 4096
"""Commands that may wait for their replies at once: what is beyond stays in the outbox, where it can be taken back."""


class CommandConnection(Protocol):
    """Where commands are submitted. The future gives the raw reply or raises the client library's error."""

    def submit(self, command: Command) -> asyncio.Future[Any]: ...

    def flush(self) -> None:
        """Let what was submitted go out now, and not at the end of the tick."""

    def reconnect(self) -> None:
        """Let what is submitted from now on go out on a new connection: the server is not the one that is wanted."""

    async def close(self) -> None: ...


class PipelinedConnection:
    """Commands of many callers on one connection."""

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        """timeout: seconds that the server may be silent while a reply is awaited, and that a new connection may take.

        The connection has no timeout of its own. It is connected when the first command is submitted.
        """
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._outbox: list[tuple[bytes, asyncio.Future[Any]]] = []
        self._line: _Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._closed = False

    def submit(self, command: Command) -> asyncio.Future[Any]:
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub means one argument
        future = self._loop.create_future()
        if self._closed:
            future.set_exception(ConnectionLost("the connection was closed"))
            return future
        self._outbox.append((packed, future))
        if len(self._outbox) >= _ENOUGH:
            self._send()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return future

    def flush(self) -> None:
        self._send()

    def reconnect(self) -> None:
        if self._line is not None:
            self._line.drop(ConnectionLost("the server is not the one that is wanted any more"))

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        error = ConnectionLost("the connection was closed")
        self._fail_outbox(error)
        if self._line is not None:
            self._line.drop(error)
        await self._connection.disconnect(nowait=True)

    def _flush(self) -> None:
        self._flushing = False
        self._send()

    def _send(self) -> None:
        """Write the outbox, as far as the line takes it; without a line, get one first."""
        line = self._line
        if line is None:
            if self._outbox and self._connecting is None and not self._closed:
                self._connecting = self._loop.create_task(self._connect(), name="perdure wire")
            return
        room = line.room
        if room >= len(self._outbox):
            batch, self._outbox = self._outbox, []
        else:
            batch, self._outbox = self._outbox[:room], self._outbox[room:]
        if batch:
            line.send(batch)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.connect()
            self._line = _Transport(self._connection, self._timeout, self._flush, self._lost)
        except (RedisError, OSError) as error:
            await self._connection.disconnect(nowait=True)
            self._fail_outbox(
                ReplyTimeout(f"no connection within {self._timeout:g} s") if isinstance(error, TimeoutError) else error
            )
        except asyncio.CancelledError:
            await self._connection.disconnect(nowait=True)
            raise
        finally:
            self._connecting = None
        self._flush()

    def _lost(self, line: _Transport) -> None:
        """The line has failed what it had sent; what waits in the outbox goes out on another."""
        if self._line is line:
            self._line = None
        if not self._closed:
            self._flush()

    def _fail_outbox(self, error: BaseException) -> None:
        waiting, self._outbox = self._outbox, []
        _fail((future for _, future in waiting), error)


class _Transport(asyncio.Protocol):
    """A connection from the end of its handshake on, which is the client library's: its transport, taken over."""

    def __init__(
        self,
        connection: AbstractConnection,
        timeout: float,
        on_room: Callable[[], None],
        on_lost: Callable[[_Transport], None],
    ) -> None:
        """on_room: called when commands may be sent again. on_lost: called once, with the line, when it has ended."""
        self._connection = connection
        self._timeout = timeout
        self._on_room = on_room
        self._on_lost = on_lost
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._paused = False
        self._ended = False
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,  # the one mapping of error replies to the library's classes
            notEnoughData=_NOT_YET,
        )
        writer = connection._writer  # the library offers no other way to its transport
        if writer is None:
            raise ConnectionLost("the connection was closed")
        self._transport = writer.transport
        self._transport.set_protocol(self)

    @property
    def room(self) -> int:
        """How many commands may be sent now."""
        return 0 if self._paused else _MOST_UNANSWERED - len(self._unanswered)

    def send(self, batch: Iterable[tuple[bytes, asyncio.Future[Any]]]) -> None:
        if not self._unanswered:
            self._heard = self._loop.time()
        packed = []
        for command, future in batch:
            if not future.done():
                packed.append(command)
                self._unanswered.append(future)
        if packed:
            self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
            if self._watch is None:
                self._watch = self._loop.call_later(self._timeout, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._replies.feed(data)
        unanswered, next_reply = self._unanswered, self._replies.gets
        was_full = len(unanswered) >= _MOST_UNANSWERED
        try:
            while (reply := next_reply()) is not _NOT_YET:
                future = unanswered.popleft()
                if future.done():
                    continue
                if isinstance(reply, RedisError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (InvalidResponse, IndexError) as error:
            self.drop(ConnectionLost(f"the server's answer is not of its protocol: {error}"))
        else:
            if was_full:
                self._on_room()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._on_room()

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(ConnectionLost(f"connection lost: {error}" if error else "the server closed the connection"))

    def drop(self, error: BaseException) -> None:
        """Give the connection up: what was sent and not answered can no longer be told to have happened or not."""
        if self._ended:
            return
        self._ended = True
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        self._connection._close()
        _fail(self._unanswered, error)
        self._on_lost(self)

    def _look(self) -> None:
        """Is the server silent while a reply is awaited?"""
        self._watch = None
        if not self._unanswered:
            return
        silent = self._loop.time() - self._heard
        if silent >= self._timeout:
            self.drop(ReplyTimeout(f"no reply within {self._timeout:g} s"))
        else:
            self._watch = self._loop.call_later(self._timeout - silent, self._look)


_NOT_YET: Final = object()


def _fail(futures: Iterable[asyncio.Future[Any]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            own = type(error)(*error.args)  # one exception cannot be raised to many: each raise adds to its traceback
            own.__cause__ = error.__cause__
            future.set_exception(own)


class ClientAdapter:
    """Commands on a client that is there already, such as a fake one: one after another, in the order submitted."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._turn = asyncio.Lock()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._carry_out(command))

    async def _carry_out(self, command: Command) -> Any:
        async with self._turn:
            return await self._client.execute_command(*command)

    def flush(self) -> None:
        """Nothing is held back."""

    def reconnect(self) -> None:
        """The client is its owner's to connect anew."""

    async def close(self) -> None:
        """The client is its owner's to close."""
