"""One connection, shared by everybody in this process: what is submitted in one tick goes out in one round trip.

While a batch is under way, what is submitted meanwhile gathers for the next one. So an idle process pays one round
trip per command, and a busy one pays one per batch. Commands go out in the order in which they were submitted. An error
reply reaches the caller whose command it answers and nobody else; a caller that was cancelled before its command went
out takes it back, and one cancelled later leaves the others alone. When the connection is lost, every command of the
batch under way fails, since nobody can tell which were carried out; those that had not gone out yet go out on the next
connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

import hiredis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as ReplyTimeout

__all__ = ["Argument", "ClientWire", "Command", "PipelinedWire", "Wire"]

Argument = str | bytes | int | float
Command = Sequence[Argument]

_MOST: Final = 1000
"""Commands in one batch: enough to make the round trip cheap, few enough that nobody waits long."""


class Wire(Protocol):
    """Where commands are submitted. The future gives the raw reply or raises the client library's error."""

    def submit(self, command: Command) -> asyncio.Future[Any]: ...

    def renew(self) -> None:
        """Let what is submitted from now on go out on a new connection: the server is not the one that is wanted."""

    async def close(self) -> None: ...


class PipelinedWire:
    """Commands of many callers on one connection."""

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        """timeout: seconds that a batch, or a new connection, may take. The connection has no timeout of its own."""
        self._connection = connection
        self._timeout = timeout
        self._queue: deque[tuple[bytes, asyncio.Future[Any]]] = deque()
        self._waiting = asyncio.Event()
        self._outdated = False
        self._loop = asyncio.get_running_loop()
        self._pump = self._loop.create_task(self._run(), name="perdure wire")

    def submit(self, command: Command) -> asyncio.Future[Any]:
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub means one argument
        future = self._loop.create_future()
        if self._pump.done():
            future.set_exception(ConnectionLost("the connection was closed"))
            return future
        self._queue.append((packed, future))
        self._waiting.set()
        return future

    def renew(self) -> None:
        self._outdated = True

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._connection.disconnect()

    async def _run(self) -> None:
        try:
            while True:
                await self._waiting.wait()
                self._waiting.clear()
                while self._queue:
                    await self._exchange(self._next_batch())
        finally:
            _fail([future for _, future in self._queue], ConnectionLost("the connection was closed"))

    def _next_batch(self) -> list[tuple[bytes, asyncio.Future[Any]]]:
        batch: list[tuple[bytes, asyncio.Future[Any]]] = []
        while self._queue and len(batch) < _MOST:
            packed, future = self._queue.popleft()
            if not future.done():
                batch.append((packed, future))
        return batch

    async def _exchange(self, batch: Sequence[tuple[bytes, asyncio.Future[Any]]]) -> None:
        """Send a batch and hand out its replies; on a lost connection, its errors."""
        futures = [future for _, future in batch]
        connection = self._connection
        try:
            async with asyncio.timeout(self._timeout):
                if self._outdated:
                    self._outdated = False
                    await connection.disconnect(nowait=True)
                if not connection.is_connected:
                    await connection.connect()
                await connection.send_packed_command([packed for packed, _ in batch], check_health=False)
                for future in futures:
                    await self._hand_out(future)
        except (RedisError, OSError) as error:
            lost = ReplyTimeout(f"no reply within {self._timeout:g} s") if isinstance(error, TimeoutError) else error
            await self._drop(futures, lost)
        except asyncio.CancelledError:
            await self._drop(futures, ConnectionLost("the connection was closed"))
            raise

    async def _hand_out(self, future: asyncio.Future[Any]) -> None:
        try:
            reply = await self._connection.read_response()
        except ResponseError as refusal:
            if not future.done():
                future.set_exception(refusal)
        else:
            if not future.done():
                future.set_result(reply)

    async def _drop(self, futures: Sequence[asyncio.Future[Any]], error: BaseException) -> None:
        """Give the connection up: what was read of it and what is still to come can no longer be told apart."""
        _fail(futures, error)
        await self._connection.disconnect(nowait=True)


def _fail(futures: Sequence[asyncio.Future[Any]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            own = type(error)(*error.args)  # one exception cannot be raised to many: each raise adds to its traceback
            own.__cause__ = error.__cause__
            future.set_exception(own)


class ClientWire:
    """Commands on a client that is there already, such as a fake one: one after another, in the order submitted."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._turn = asyncio.Lock()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._carry_out(command))

    async def _carry_out(self, command: Command) -> Any:
        async with self._turn:
            return await self._client.execute_command(*command)

    def renew(self) -> None:
        """The client is its owner's to connect anew."""

    async def close(self) -> None:
        """The client is its owner's to close."""
