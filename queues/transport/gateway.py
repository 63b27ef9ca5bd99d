"""The one way by which commands reach Redis.

Everything else in Perdure submits commands here and awaits their replies; what goes out together, on which
connection, and what is asked again after a lost reply, is decided in this file alone.

Repeatable means: asked twice, it does no more than asked once. Reads are, and so is every script of Perdure, by
design (enqueue by id, settle by fence, record by value). A repeatable command whose reply was lost is asked again
for `patience` seconds; any other raises `Unavailable` at once, and its caller finds out what became of it. So does
`ServerFull`, where waiting helps only after somebody has made room. What replicas must have goes out on a connection of
its own (replication.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import redis.asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from ..embedded import EmbeddedServer
from ..errors import NotReplicated, QueueError, Refused, ServerFull, Unavailable
from ..security import NO_KEYS, Encryptor
from .address import Address, Node
from .backoff import Backoff
from .blocking import BlockingConnection
from .clients import (
    COMMAND_TIMEOUT,
    async_client,
    check_server,
    is_read_only,
    pipelined_connection,
    translated,
    was_not_executed,
)
from .cluster import ClusterConnection
from .pipelining import Argument, ClientAdapter, Command, CommandConnection, PipelinedConnection
from .replication import Replication, Replicator
from .scripts import Script, loaded_scripts

__all__ = ["BLOCK", "Argument", "BlockingConnection", "Command", "Gateway"]

BLOCK: Final = 5.0
"""Seconds for which a blocking read waits on the server before it asks again."""

_REPEAT: Final = Backoff(first=0.02, longest=1.0)
"""Delays before a command is sent again."""

_READ_MARGIN: Final = 10.0
"""Seconds a blocking read may take beyond BLOCK before its connection is taken for dead."""

_TROUBLE: Final = (RedisError, OSError, Unavailable)
"""What the client library raises, and what it is once translated."""


class Gateway:
    """Commands, scripts and pipelines on one server, or on the nodes of a cluster."""

    def __init__(
        self,
        address: Address,
        *,
        patience: float = 3.0,
        replication: Replication | None = None,
        encryptor: Encryptor = NO_KEYS,
    ) -> None:
        """`patience`: seconds for which a repeatable command is asked again before `Unavailable` is raised.

        replication: how many replicas must have what `run_replicated` writes, and how long they are waited for. sealer:
        what this room seals and opens data of tasks with; the gateway itself carries bytes, and looks into none.
        """
        self.address = address
        self.replication = replication or Replication()
        self.encryptor = encryptor
        self.patience = patience
        self._embedded = EmbeddedServer(address.directory) if address.directory is not None else None
        self._client: redis.asyncio.Redis | None = None
        self._open_wire: CommandConnection | None = None
        self._cluster: ClusterConnection | None = None
        self._replicator: Replicator | None = None
        self._borrowed = False

    @property
    def clustered(self) -> bool:
        """Whether the keys are spread over the nodes of a Redis Cluster."""
        return self.address.clustered

    @classmethod
    def over(cls, client: redis.asyncio.Redis) -> Gateway:
        """A gateway over a client that is there already, such as a fake one; it is not checked and not closed."""
        gateway = cls(Address("redis://borrowed"))
        client.response_callbacks.clear()
        gateway._client = client
        gateway._open_wire = ClientAdapter(client)
        gateway._borrowed = True
        return gateway

    async def open(self) -> None:
        """Connect and check the server; `Unavailable` or `Refused` says what is wrong."""
        if self.clustered:
            cluster = self._open_wire = self._cluster = ClusterConnection(self.address, self._dial)
            check: Callable[[], Awaitable[Any]] = cluster.open
        else:
            await self._join()
            self._client = async_client(self.address, self.socket)
            self._open_wire = self._dial(None)
            check = self._check_server
        try:
            try:
                await check()
            except _TROUBLE as error:
                if self._cluster is None:
                    raise  # the command that asked was patient
                await self._again(error, check, True)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        wire, self._open_wire = self._open_wire, None
        replicator, self._replicator = self._replicator, None
        self._cluster = None
        with anyio.CancelScope(shield=True):
            if replicator is not None:
                await replicator.close()
            if wire is not None:
                await wire.close()
            if client is not None and not self._borrowed:
                await client.aclose()
            if self._embedded is not None:
                await anyio.to_thread.run_sync(self._embedded.leave)

    def _dial(self, node: Node | None) -> CommandConnection:
        return PipelinedConnection(pipelined_connection(self.address, self.socket, node), COMMAND_TIMEOUT)

    async def _join(self) -> Path | None:
        if self._embedded is None:
            return None
        return await anyio.to_thread.run_sync(self._embedded.ensure)

    @property
    def socket(self) -> Path | None:
        """The embedded server's socket; None for any other server."""
        return None if self._embedded is None else self._embedded.socket

    async def _check_server(self) -> None:
        try:
            info: bytes = await self.command("INFO", "server")
        except Refused as error:
            if "permission" in str(error).lower():
                return  # a managed server may hide INFO; what is too old will refuse its first command
            raise
        check_server(self.address, info)

    # commands

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        """Carry out one command; returns the raw reply.

        node_of: in a cluster, a key; the command goes to the node that serves it. For commands that name no key.
        """
        try:
            return await self._submit(command, node_of)
        except _TROUBLE as error:
            return await self._again(error, lambda: self._submit(command, node_of), repeatable)

    async def command_now(self, *command: Argument) -> Any:
        """The same for one command that is not repeatable, which goes out now and does not wait for the tick's end.

        For what the server is to work on while this process works on something else.
        """
        try:
            reply = self._submit(command)
            self._wire.flush()
            return await reply
        except _TROUBLE as error:
            return await self._again(error, lambda: self._submit(command), False)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Carry out one script atomically; all of Perdure's are repeatable."""
        try:
            return await self._submit(("EVALSHA", script.sha, len(keys), *keys, *args))
        except _TROUBLE as error:
            return await self._again(error, lambda: self._evaluate(script, keys, args), True)

    async def _evaluate(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        try:
            return await self._submit(("EVALSHA", script.sha, len(keys), *keys, *args))
        except NoScriptError:
            return await self._submit(("EVAL", script.source, len(keys), *keys, *args))

    async def run_replicated(self, script: Script, keys: Sequence[str], args: Sequence[Argument], mark: str) -> Any:
        """Carry out one script, and wait until so many replicas have what it wrote as `replication` asks for.

        mark: a key beside those of the script, for the writing (see replication.py). Raises `NotReplicated` where too
        few are known to have it in time: then it is stored, and asked again it only asks the replicas again.
        """
        by_digest = ("EVALSHA", script.sha, len(keys), *keys, *args)
        by_text = ("EVAL", script.source, len(keys), *keys, *args)

        async def evaluate() -> Any:
            try:
                return await self._replicated().carry_out(by_digest, mark)
            except NoScriptError:
                return await self._replicated().carry_out(by_text, mark)

        try:
            return await evaluate()
        except _TROUBLE as error:
            return await self._again(error, evaluate, True)

    def _replicated(self) -> Replicator:
        """Where replicated writes go. Raises `Unavailable` where the connection is not open."""
        wire = self._wire
        if isinstance(wire, ClientAdapter):
            raise Refused("on a client that is somebody else's, replicas cannot be waited for")
        if self._replicator is None:

            def dial(node: Node | None) -> AbstractConnection:
                return pipelined_connection(self.address, self.socket, node)

            self._replicator = Replicator(self.address.shown, self.replication, dial, self._cluster)
        return self._replicator

    async def load_scripts(self) -> None:
        """Make the server, or every primary of a cluster, know every script of this process, in one round trip."""
        commands = [("SCRIPT", "LOAD", script.source) for script in loaded_scripts()]
        if self._cluster is None:
            await self.pipeline(commands)
            return
        # A primary that cannot be reached now, or comes later, is sent the text when it asks for it (NOSCRIPT).
        loading = [future for command in commands for future in self._cluster.submit_everywhere(command)]
        await asyncio.gather(*loading, return_exceptions=True)

    async def pipeline(self, commands: Sequence[Command], *, node_of: str | None = None) -> list[Any]:
        """Carry out commands in order and in one round trip, not atomically. All must be repeatable.

        In a cluster each goes to the node that serves its key, or to that of `node_of`, and the order holds per node.
        A command that the server refused raises `Refused`, after all were carried out.
        """

        try:
            return await self._together(commands, node_of)
        except _TROUBLE as error:
            replies: list[Any] = await self._again(error, lambda: self._together(commands, node_of), True)
            return replies

    async def _together(self, commands: Sequence[Command], node_of: str | None) -> list[Any]:
        sent = [self._submit(command, node_of) for command in commands]
        replies = await asyncio.gather(*sent, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def _submit(self, command: Command, node_of: str | None = None) -> asyncio.Future[Any]:
        if self._cluster is not None:
            return self._cluster.submit(command, node_of)
        return self._wire.submit(command)

    @property
    def _wire(self) -> CommandConnection:
        if self._open_wire is None:
            raise Unavailable(
                f"the connection to {self.address.shown} is not open: use 'async with' around what needs it"
            )
        return self._open_wire

    async def _again(self, error: BaseException, call: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        """After a call failed: when it may be repeated and repeating may help, again, until patience ends.

        What a server refused without doing anything may always be repeated.
        """
        deadline, delays = time.monotonic() + self.patience, _REPEAT.delays()
        while True:
            if not isinstance(error, NoScriptError):
                await self._be_patient(error, repeatable or was_not_executed(error), deadline, next(delays))
            try:
                return await call()
            except _TROUBLE as another:
                error = another

    async def _be_patient(self, error: BaseException, again: bool, deadline: float, delay: float) -> None:
        """Wait before a call is made again; raise what its error means where it is not to be made again."""
        try:
            with translated(self.address.shown):
                raise error
        except (ServerFull, NotReplicated):
            raise  # somebody must make room, or mend a replica, which takes longer
        except Unavailable:
            if is_read_only(error) and self._open_wire is not None:
                self._open_wire.reconnect()
            if not again or time.monotonic() + delay > deadline or self._open_wire is None:
                raise
        await anyio.sleep(delay)
        await self._join()

    # connections of their own

    def reader(self, key: str | None = None) -> BlockingConnection:
        """A connection for blocking reads. key: in a cluster, what is read; the connection follows it."""
        if self._cluster is not None and key is None:
            raise ValueError("in a cluster, a reader needs the key of what it will read")
        return BlockingConnection(
            self.address.shown,
            self._dial_reader,
            self._unblock,
            cluster=self._cluster,
            key=key,
            borrowed=self._borrowed,
        )

    def _dial_reader(self, node: Node | None) -> redis.asyncio.Redis:
        if self._borrowed:
            return self._client_or_fail()
        return async_client(self.address, self.socket, timeout=BLOCK + _READ_MARGIN, connections=1, node=node)

    async def _unblock(self, client_id: int, node: Node | None) -> Any:
        """Ids of clients are a node's own, so it is that node which must hear it."""
        command = ("CLIENT", "UNBLOCK", client_id)
        if self._cluster is None or node is None:
            return await self.command(*command)
        cluster = self._cluster
        try:
            return await cluster.submit_to(node, command)
        except _TROUBLE as error:
            return await self._again(error, lambda: cluster.submit_to(node, command), True)

    async def subscription(self) -> PubSub:
        """A connection for subscriptions, connected; in a cluster to any node, since news goes to all of them."""
        if self._cluster is None:
            with translated(self.address.shown):
                return await _connected(self._client_or_fail().pubsub())
        lost: QueueError = Unavailable(f"no node of {self.address.shown} is known")
        for node in self._cluster.reachable():
            try:
                with translated(self.address.shown):
                    return await _connected(async_client(self.address, None, connections=1, node=node).pubsub())
            except Unavailable as error:
                self._cluster.mark_failed(node)
                lost = error
        raise lost

    def _client_or_fail(self) -> redis.asyncio.Redis:
        if self._client is None:
            raise Unavailable(f"the connection to {self.address.shown} is not open")
        return self._client


async def _connected(pubsub: PubSub) -> PubSub:
    try:
        await pubsub.connect()
    except BaseException:
        await pubsub.aclose()
        raise
    return pubsub


def is_missing_group(error: Refused) -> bool:
    """Whether a stream's consumer group is not there (a new queue, or a server that was emptied)."""
    cause = error.__cause__
    return isinstance(cause, ResponseError) and "NOGROUP" in str(cause)
