"""Writes that replicas are known to have: on a connection of their own, where many wait together.

`WAIT` tells how many replicas have all that its own connection has written, and holds the connection up meanwhile. So
these writes keep away from the other commands, and go out in rounds: what is submitted while one round waits makes the
next, and each round has one WAIT.

Before each WAIT a mark is written. A script that is asked again may find all done and write nothing, and then WAIT
would speak of what this connection wrote before. (So from Redis 7.2 on; up to 7.0 it is the server's offset at the last
command of the connection, whatever that was.) The mark comes behind all that was written until then, and replication
keeps the order, so a replica that has it has everything. It goes to the same server as the scripts: a round is one
write to one connection, and one that breaks in the middle fails as a whole.

What it does not promise: WAIT is no consensus (see the page of the command: it "does not make Redis a strongly
consistent store"). A failover may promote a replica that was not among those that had the write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ClusterDownError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as ReplyTimeout

from ..errors import NotReplicated
from .address import Node
from .clients import COMMAND_TIMEOUT, is_read_only
from .cluster import ClusterConnection, RedirectPolicy, slot_of
from .pipelining import Command

__all__ = ["Replicated", "Replication", "Replicator"]

Replicated = Literal["replicated"]
"""What durability is called that replicas are asked about."""

_MARK_TTL: Final = 60_000
"""Milliseconds that a mark stays; it is of no use once its round is over."""


@dataclass(frozen=True, slots=True)
class Replication:
    """How many replicas must have what is to be replicated, and how many seconds they are waited for."""

    replicas: int = 1
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be 1 or more, not {self.replicas}: without any, leave durability out")
        if self.timeout <= 0:
            raise ValueError(f"the time that replicas are waited for must be more than 0 seconds, not {self.timeout}")


class _Write(NamedTuple):
    """One command that waits for its round."""

    command: Command
    mark: str
    future: asyncio.Future[Any]


class Replicator:
    """Replicated writes to one server, or to the nodes of a cluster."""

    def __init__(
        self,
        shown: str,
        replication: Replication,
        dial: Callable[[Node | None], AbstractConnection],
        cluster: ClusterConnection | None,
    ) -> None:
        """dial: makes a connection without timeouts, in a cluster to a node; it is connected when it is needed."""
        self._shown = shown
        self._replication = replication
        self._dial = dial
        self._cluster = cluster
        self._rounds: dict[Node | None, _Rounds] = {}

    async def carry_out(self, command: Command, mark: str) -> Any:
        """Carry out a command, and wait until the replicas have it. mark: a key in the same hash slot.

        Raises the client library's errors, and `NotReplicated`.
        """
        if self._cluster is None:
            return await self._to(None).submit(command, mark)
        cluster, slot = self._cluster, slot_of(command)
        pursuit, node, asking = RedirectPolicy(slot), cluster.serving(mark), False
        while True:
            error: Exception = ClusterDownError(f"no node serves {mark}")
            if asking:
                # A mark written there now would stand in the way of the one that is moved there (BUSYKEY).
                error = TryAgainError(f"the slot of {mark} is on its way to {node}")
            elif node is not None:
                try:
                    return await self._to(node).submit(command, mark)
                except ResponseError as refused:
                    error = refused
                except (ConnectionLost, ReplyTimeout, OSError):
                    cluster.mark_failed(node)
                    raise
            await anyio.sleep(pursuit.pause(error))  # raises where it will not pass
            node, asking = await cluster.next_node(slot, node, error)

    def _to(self, node: Node | None) -> _Rounds:
        found = self._rounds.get(node)
        if found is None:
            found = self._rounds[node] = _Rounds(self._shown, self._replication, self._dial(node))
        return found

    async def close(self) -> None:
        rounds, self._rounds = self._rounds, {}
        await asyncio.gather(*(one.close() for one in rounds.values()))


class _Rounds:
    """The rounds on one connection, one after another."""

    def __init__(self, shown: str, replication: Replication, connection: AbstractConnection) -> None:
        self._shown = shown
        self._replication = replication
        self._connection = connection
        self._outbox: list[_Write] = []
        self._going: asyncio.Task[None] | None = None

    def submit(self, command: Command, mark: str) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._outbox.append(_Write(command, mark, future))
        if self._going is None:
            self._going = loop.create_task(self._go(), name="perdure replication")
        return future

    async def close(self) -> None:
        if self._going is not None:
            self._going.cancel()
            await asyncio.gather(self._going, return_exceptions=True)
        await self._connection.disconnect(nowait=True)

    async def _go(self) -> None:
        """Rounds, until nothing waits for one. It begins in the next tick, so what comes in one tick goes together."""
        batch: list[_Write] = []
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                await self._round([write for write in batch if not write.future.done()])
        except asyncio.CancelledError:
            _fail([*batch, *self._outbox], ConnectionLost("the connection was closed"))
            raise
        finally:
            self._going = None

    async def _round(self, batch: Sequence[_Write]) -> None:
        if not batch:
            return
        try:
            async with asyncio.timeout(self._replication.timeout + COMMAND_TIMEOUT):
                replies, reached = await self._exchange(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the callers'
            await self._connection.disconnect(nowait=True)
            _fail(batch, _lost(error))
            return
        wanted, timeout = self._replication.replicas, self._replication.timeout
        for write, reply in zip(batch, replies, strict=True):
            if write.future.done():
                continue
            if isinstance(reply, Exception):
                write.future.set_exception(reply)
            elif isinstance(reached, Exception):
                write.future.set_exception(_copy(reached))
            elif reached < wanted:
                write.future.set_exception(NotReplicated(self._shown, reached, wanted, timeout))
            else:
                write.future.set_result(reply)
        if any(is_read_only(reply) for reply in replies if isinstance(reply, Exception)):
            await self._connection.disconnect(nowait=True)  # the next one leads to the primary of the day

    async def _exchange(self, batch: Sequence[_Write]) -> tuple[list[Any], Any]:
        """One round trip: the commands, their marks, one WAIT. Returns their replies, and how many replicas have it."""
        connection = self._connection
        await connection.connect()
        asked: list[Command] = [write.command for write in batch]
        asked += [("SET", mark, 1, "PX", _MARK_TTL) for mark in dict.fromkeys(write.mark for write in batch)]
        asked.append(("WAIT", self._replication.replicas, max(1, round(self._replication.timeout * 1000))))
        packed = [chunk for command in asked for chunk in connection.pack_command(*command)]
        await connection.send_packed_command(packed, check_health=False)
        *replies, reached = [await self._answer() for _ in asked]
        marked = replies[len(batch) :]
        unmarked = next((answer for answer in marked if isinstance(answer, Exception)), None)
        some = any(not isinstance(answer, Exception) for answer in marked)
        return replies[: len(batch)], reached if some else unmarked

    async def _answer(self) -> Any:
        """The next reply; an error reply as an object. Raises what breaks the connection."""
        try:
            return await self._connection.read_response()
        except ResponseError as refused:
            return refused


def _fail(batch: Sequence[_Write], error: Exception) -> None:
    for write in batch:
        if not write.future.done():
            write.future.set_exception(_copy(error))


def _lost(error: Exception) -> Exception:
    """What broke an exchange, as the client library says such things."""
    if isinstance(error, TimeoutError):
        return ReplyTimeout("no reply to a write that is to be replicated")
    if isinstance(error, (RedisError, OSError)):
        return error
    lost = ConnectionLost(str(error))
    lost.__cause__ = error
    return lost


def _copy(error: Exception) -> Exception:
    """One exception cannot be raised to many: each raise adds to its traceback."""
    own = type(error)(*error.args)
    own.__cause__ = error.__cause__
    return own
