"""Automatic pipelining: the commands that a process submits in one tick of the event loop share few writes.

A submitted command enters the outbox. The outbox is written at the end of the tick, or as soon as it holds enough
commands to keep the server busy; outstanding replies do not delay it. Replies come in the order of the commands, so
each belongs to the oldest unanswered future. An error reply is raised to the caller of its command only. A caller that
is cancelled before the write withdraws its command; a later cancellation does not affect other commands. When the
connection is lost, every written command fails, because the client cannot know which ones were executed; the commands
in the outbox are written to the next connection.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import hiredis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as ReplyTimeout

from ..errors import EventLoopError

Argument = str | bytes | int | float
Command = Sequence[Argument]


_OTHER_LOOP: Final = (
    "the connection belongs to another event loop: call the synchronous result_sync and the like, or find the task "
    "again by its id (app.producer.find) inside 'async with app:' on this loop"
)


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Numbers of commands of one pipelined connection.

    Args:
        early_write: commands that are written before the tick ends, so that the server executes them meanwhile.
        unanswered: written commands that may wait for replies; further ones stay in the outbox.
    """

    early_write: int = 8
    unanswered: int = 4096


class CommandConnection(Protocol):
    """A connection that accepts commands. The future returns the raw reply or raises the client library's error."""

    def submit(self, command: Command) -> asyncio.Future[Any]: ...

    def flush(self) -> None:
        """Write the submitted commands now instead of at the end of the tick."""

    def reconnect(self) -> None:
        """Use a new connection from now on, because this server is not the primary any more."""

    async def close(self) -> None: ...


class PipelinedConnection:
    """One connection that pipelines the commands of many callers."""

    def __init__(
        self, connection: AbstractConnection, timeout: float, limits: PipelineLimits = PipelineLimits()
    ) -> None:
        """Args:
        connection: without a timeout; it is connected when the first command is submitted.
        timeout: seconds that the server may be silent while a reply is outstanding, and that connecting may take.
        """
        self._limits = limits
        self._connection = connection
        self._timeout = timeout
        self._loop = get_running_loop()
        self._outbox: list[tuple[bytes, asyncio.Future[Any]]] = []
        self._transport: _Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._closed = False

    def submit(self, command: Command) -> asyncio.Future[Any]:
        if get_running_loop() is not self._loop:
            raise EventLoopError(_OTHER_LOOP)
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub means one argument
        future = self._loop.create_future()
        if self._closed:
            future.set_exception(ConnectionLost("the connection was closed"))
            return future
        self._outbox.append((packed, future))
        if len(self._outbox) >= self._limits.early_write:
            self._send()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return future

    def flush(self) -> None:
        self._send()

    def reconnect(self) -> None:
        if self._transport is not None:
            self._transport.drop(ConnectionLost("the server is not the primary any more"))

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        error = ConnectionLost("the connection was closed")
        self._fail_outbox(error)
        if self._transport is not None:
            self._transport.drop(error)
        await self._connection.disconnect(nowait=True)

    def _flush(self) -> None:
        self._flushing = False
        self._send()

    def _send(self) -> None:
        """Write as much of the outbox as the transport accepts; connect first if it is closed."""
        transport = self._transport
        if transport is None:
            if self._outbox and self._connecting is None and not self._closed:
                self._connecting = self._loop.create_task(self._connect(), name="perdure connect")
            return
        room = transport.room
        if room >= len(self._outbox):
            batch, self._outbox = self._outbox, []
        else:
            batch, self._outbox = self._outbox[:room], self._outbox[room:]
        if batch:
            transport.send(batch)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.connect()
            self._transport = _Transport(
                self._connection, self._timeout, self._limits.unanswered, self._flush, self._on_lost
            )
        except Exception as error:  # noqa: BLE001 - commands would wait for ever for a connection
            await self._connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                error = ReplyTimeout(f"no connection within {self._timeout:g} s")
            elif not isinstance(error, (RedisError, OSError)):  # such as a host name that cannot be encoded
                error = ConnectionLost(f"{type(error).__name__}: {error}")
            self._fail_outbox(error)
        except asyncio.CancelledError:
            await self._connection.disconnect(nowait=True)
            raise
        finally:
            self._connecting = None
        self._flush()

    def _on_lost(self, transport: _Transport) -> None:
        """Write the outbox to a new connection; the transport has failed the commands that it had written."""
        if self._transport is transport:
            self._transport = None
        if not self._closed:
            self._flush()

    def _fail_outbox(self, error: BaseException) -> None:
        waiting, self._outbox = self._outbox, []
        _fail((future for _, future in waiting), error)


class _Transport(asyncio.Protocol):
    """The transport of a connection after the client library's handshake, taken over from the library."""

    def __init__(
        self,
        connection: AbstractConnection,
        timeout: float,
        max_unanswered: int,
        on_room: Callable[[], None],
        on_lost: Callable[[_Transport], None],
    ) -> None:
        """Args:
        on_room: called when commands may be written again.
        on_lost: called once, when the transport has ended.
        """
        self._connection = connection
        self._timeout = timeout
        self._max_unanswered = max_unanswered
        self._on_room = on_room
        self._on_lost = on_lost
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._loop = get_running_loop()
        self._last_reply = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._ended = False
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,  # the one mapping of error replies to the library's classes
            notEnoughData=_INCOMPLETE,
        )
        reader, writer = connection._reader, connection._writer  # the library has no public access to its transport
        if reader is None or writer is None:
            raise ConnectionLost("the connection was closed")
        # If it has ended already, the library's protocol was told, and this one never will be.
        if reader.at_eof() or writer.transport.is_closing():
            raise ConnectionLost("the server closed the connection")
        self._transport = writer.transport
        self._transport.set_protocol(self)

    @property
    def room(self) -> int:
        """Number of commands that may be written now."""
        return 0 if self._paused else self._max_unanswered - len(self._unanswered)

    def send(self, batch: Iterable[tuple[bytes, asyncio.Future[Any]]]) -> None:
        if not self._unanswered:
            self._last_reply = self._loop.time()
        packed = []
        for command, future in batch:
            if not future.done():
                packed.append(command)
                self._unanswered.append(future)
        if packed:
            self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout, self._check_silence)

    def data_received(self, data: bytes) -> None:
        self._last_reply = self._loop.time()
        self._replies.feed(data)
        unanswered, next_reply = self._unanswered, self._replies.gets
        was_full = len(unanswered) >= self._max_unanswered
        try:
            while (reply := next_reply()) is not _INCOMPLETE:
                future = unanswered.popleft()
                if future.done():
                    continue
                if isinstance(reply, RedisError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (InvalidResponse, IndexError) as error:
            self.drop(ConnectionLost(f"could not parse the server's reply: {error}"))
        else:
            if was_full:
                self._on_room()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop(ConnectionLost(f"connection lost: {exc}" if exc else "the server closed the connection"))

    def drop(self, error: BaseException) -> None:
        """Abort the connection and fail the unanswered commands, which the server may or may not have executed."""
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        self._connection._close()
        _fail(self._unanswered, error)
        self._on_lost(self)

    def _check_silence(self) -> None:
        """Drop the connection if the server was silent for the timeout while a reply is outstanding."""
        self._timer = None
        if not self._unanswered:
            return
        silent = self._loop.time() - self._last_reply
        if silent >= self._timeout:
            self.drop(ReplyTimeout(f"no reply within {self._timeout:g} s"))
        else:
            self._timer = self._loop.call_later(self._timeout - silent, self._check_silence)


_INCOMPLETE: Final = object()


def _fail(futures: Iterable[asyncio.Future[Any]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            own = type(error)(*error.args)  # one exception per caller: each raise extends the traceback
            own.__cause__ = error.__cause__
            future.set_exception(own)


class ClientAdapter:
    """Commands on an existing client, such as a fake one, executed one after another in the order of submission."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._lock = asyncio.Lock()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._execute(command))

    async def _execute(self, command: Command) -> Any:
        async with self._lock:
            return await self._client.execute_command(*command)

    def flush(self) -> None:
        """Do nothing: commands are executed at once."""

    def reconnect(self) -> None:
        """Do nothing: the owner of the client reconnects it."""

    async def close(self) -> None:
        """Do nothing: the owner of the client closes it."""
