"""Replicated writes: scripts whose writes a number of replicas must confirm (WAIT).

`WAIT` returns how many replicas have received all writes of its own connection, and blocks that connection meanwhile.
So replicated writes use a separate connection, in rounds: the commands submitted during one round form the next one,
and each round has one WAIT.

Each round writes a marker key before WAIT. A repeated script may find its work done and write nothing, and then WAIT
would report on an earlier write of the connection (from Redis 7.2 on; up to 7.0, on the server's offset at the
connection's last command). The marker follows all earlier writes, and replication preserves the order, so a replica
that has the marker has everything. A round is one write to one connection; if it breaks, the whole round fails.

Limit: WAIT is not a consensus protocol (its documentation: it "does not make Redis a strongly consistent store"). A
failover may promote a replica that did not confirm the write.
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
from .cluster.client import ClusterConnection
from .cluster.hash_slots import RedirectPolicy, slot_of
from .pipelining import Command

Replicated = Literal["replicated"]
"""The value of `durability` for a write that replicas must confirm."""

_MARK_TTL: Final = 60_000
"""Milliseconds until a marker expires; it is not needed after its round."""


@dataclass(frozen=True, slots=True)
class Replication:
    """Number of replicas that must confirm a write, and the timeout in seconds."""

    replicas: int = 1
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(
                f"replicas must be 1 or more, got {self.replicas}; omit durability if no replica is needed"
            )
        if self.timeout <= 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {self.timeout}")


class _Write(NamedTuple):
    """A command that waits for its round."""

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
        """dial: returns a connection without timeouts, not yet connected, in a cluster to a node."""
        self._shown = shown
        self._replication = replication
        self._dial = dial
        self._cluster = cluster
        self._rounds: dict[Node | None, _Rounds] = {}

    async def execute(self, command: Command, mark: str) -> Any:
        """Execute a command, and wait until the replicas confirm it. mark: the marker key, in the same hash slot.

        Raises the client library's errors, and `NotReplicated`.
        """
        if self._cluster is None:
            return await self._rounds_on(None).submit(command, mark)
        cluster, slot = self._cluster, slot_of(command)
        policy, node, asking = RedirectPolicy(slot), cluster.serving(mark), False
        while True:
            error: Exception = ClusterDownError(f"no node serves {mark}")
            if asking:
                # A marker written to the importing node would conflict with the one that is migrated there (BUSYKEY).
                error = TryAgainError(f"the slot of {mark} is migrating to {node}")
            elif node is not None:
                try:
                    return await self._rounds_on(node).submit(command, mark)
                except ResponseError as refused:
                    error = refused
                except (ConnectionLost, ReplyTimeout, OSError):
                    cluster.mark_failed(node)
                    raise
            await anyio.sleep(policy.pause(error))  # raises an error that is not transient
            node, asking = await cluster.next_node(slot, node, error)

    def _rounds_on(self, node: Node | None) -> _Rounds:
        found = self._rounds.get(node)
        if found is None:
            found = self._rounds[node] = _Rounds(self._shown, self._replication, self._dial(node))
        return found

    async def close(self) -> None:
        rounds, self._rounds = self._rounds, {}
        await asyncio.gather(*(found.close() for found in rounds.values()))


class _Rounds:
    """The rounds of one connection, one after another."""

    def __init__(self, shown: str, replication: Replication, connection: AbstractConnection) -> None:
        self._shown = shown
        self._replication = replication
        self._connection = connection
        self._outbox: list[_Write] = []
        self._task: asyncio.Task[None] | None = None

    def submit(self, command: Command, mark: str) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._outbox.append(_Write(command, mark, future))
        if self._task is None:
            self._task = loop.create_task(self._run(), name="perdure replication")
        return future

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._connection.disconnect(nowait=True)

    async def _run(self) -> None:
        """Run rounds until the outbox is empty. The first starts in the next tick, with all commands of this one."""
        batch: list[_Write] = []
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                await self._round([write for write in batch if not write.future.done()])
        except asyncio.CancelledError:
            _fail([*batch, *self._outbox], ConnectionLost("the connection was closed"))
            raise
        finally:
            self._task = None

    async def _round(self, batch: Sequence[_Write]) -> None:
        if not batch:
            return
        try:
            async with asyncio.timeout(self._replication.timeout + COMMAND_TIMEOUT):
                replies, confirmed = await self._exchange(batch)
        except Exception as error:  # noqa: BLE001 - every error belongs to the callers
            await self._connection.disconnect(nowait=True)
            _fail(batch, _lost(error))
            return
        wanted, timeout = self._replication.replicas, self._replication.timeout
        for write, reply in zip(batch, replies, strict=True):
            if write.future.done():
                continue
            if isinstance(reply, Exception):
                write.future.set_exception(reply)
            elif isinstance(confirmed, Exception):
                write.future.set_exception(_copy(confirmed))
            elif confirmed < wanted:
                missing = NotReplicated(self._shown, confirmed, wanted, timeout)
                missing.reply = reply
                write.future.set_exception(missing)
            else:
                write.future.set_result(reply)
        if any(is_read_only(reply) for reply in replies if isinstance(reply, Exception)):
            await self._connection.disconnect(nowait=True)  # the next connection leads to the current primary

    async def _exchange(self, batch: Sequence[_Write]) -> tuple[list[Any], Any]:
        """Send the commands, their markers and one WAIT; return the replies and the number of replicas."""
        connection = self._connection
        await connection.connect()
        commands: list[Command] = [write.command for write in batch]
        commands += [("SET", mark, 1, "PX", _MARK_TTL) for mark in dict.fromkeys(write.mark for write in batch)]
        commands.append(("WAIT", self._replication.replicas, max(1, round(self._replication.timeout * 1000))))
        packed = [chunk for command in commands for chunk in connection.pack_command(*command)]
        await connection.send_packed_command(packed, check_health=False)
        *replies, confirmed = [await self._read_reply() for _ in commands]
        marked = replies[len(batch) :]
        unmarked = next((answer for answer in marked if isinstance(answer, Exception)), None)
        some = any(not isinstance(answer, Exception) for answer in marked)
        return replies[: len(batch)], confirmed if some else unmarked

    async def _read_reply(self) -> Any:
        """Return the next reply, an error reply as an object. Raises errors of the connection."""
        try:
            return await self._connection.read_response()
        except ResponseError as refused:
            return refused


def _fail(batch: Sequence[_Write], error: Exception) -> None:
    for write in batch:
        if not write.future.done():
            write.future.set_exception(_copy(error))


def _lost(error: Exception) -> Exception:
    """Return the error of a broken exchange as one of the client library's."""
    if isinstance(error, TimeoutError):
        return ReplyTimeout("no reply to a replicated write")
    if isinstance(error, (RedisError, OSError)):
        return error
    lost = ConnectionLost(str(error))
    lost.__cause__ = error
    return lost


def _copy(error: Exception) -> Exception:
    """Return a copy, one per caller: each raise extends the traceback."""
    own = type(error)(*error.args)
    own.__cause__ = error.__cause__
    return own
