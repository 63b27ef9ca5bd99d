"""Cluster client: one pipelined connection per primary; commands follow their keys when slots move.

A connection is opened when it is first needed, and closed when its node has left the cluster. A redirection (MOVED,
ASK) or transient refusal (TRYAGAIN, CLUSTERDOWN, LOADING, READONLY) means that the command was not executed, so it is
sent again even if it is not repeatable; after a few seconds the caller gets the last error. A lost connection fails its
commands at once, because the client cannot know which were executed, and the topology is discovered again.

Commands that a caller awaits one after another stay in order. Of the commands submitted together, those for one node
stay in order unless one of them is redirected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
import redis
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as ReplyTimeout

from ...errors import QueueError
from ...runtime import RUNTIME
from ..address import Address, Node
from ..clients import sync_client
from ..pipelining import Argument, Command, CommandConnection
from .hash_slots import RedirectPolicy, is_transient, slot_of
from .topology import Topology, discover_topology, in_random_order, target

_LOST = (ConnectionLost, ReplyTimeout, OSError)


@dataclass(frozen=True, slots=True)
class ClusterTimings:
    """Durations in seconds.

    Args:
        between_discoveries: pause after a discovery of the topology, so that redirections do not cause a storm of them.
        discovery: time that a node may take to report the topology.
        drain: time in which the outstanding commands of a node that has left may still be answered.
        silence: time without a reply after which a node with outstanding commands may have been replaced.
        suspicion: time for which a failed node is asked after the others.
    """

    between_discoveries: float = 0.1
    discovery: float = 1.0
    drain: float = 1.0
    silence: float = 2.0
    suspicion: float = 10.0


@dataclass(slots=True, eq=False)
class _NodeConnection:
    """The connection to one node, with the number of its outstanding commands."""

    connection: CommandConnection
    outstanding: int = 0
    last_reply: float = 0.0
    """Time of the last reply, or of the first command after an idle period (monotonic clock, seconds)."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, command: Command) -> asyncio.Future[Any]:
        future = self.connection.submit(command)
        if not self.outstanding:
            self.last_reply = RUNTIME.monotonic()
        self.outstanding += 1
        self.idle.clear()
        future.add_done_callback(self._answered)
        return future

    def _answered(self, _: asyncio.Future[Any]) -> None:
        self.outstanding -= 1
        self.last_reply = RUNTIME.monotonic()
        if not self.outstanding:
            self.idle.set()


class ClusterConnection:
    """Commands of many callers to a cluster, on one connection per primary."""

    def __init__(
        self,
        address: Address,
        dial: Callable[[Node], CommandConnection],
        *,
        discover: Callable[..., Topology] = discover_topology,
        timings: ClusterTimings = ClusterTimings(),
    ) -> None:
        """Args:
        dial: returns the connection to one node.
        discover: asks nodes for the topology, in a thread.
        """
        self._timings = timings
        self._address = address
        self._dial = dial
        self._discover_from = discover
        self._topology = Topology.unknown()
        self._connections: dict[Node, _NodeConnection] = {}
        self._leaving: set[_NodeConnection] = set()
        self._failures: dict[Node, float] = {}
        self._discovery: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def open(self) -> None:
        """Discover the topology from any node of the address, and check the server."""
        self._adopt(await self._discover(in_random_order(self._address.nodes), check=True))
        _ = self._spawn(self._watch_silence())

    def flush(self) -> None:
        for node_connection in self._connections.values():
            node_connection.connection.flush()

    def reconnect(self) -> None:
        """Discover the topology: a server that refused a write has become a replica."""
        _ = self._start_discovery()

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        connections, self._connections = [*self._connections.values(), *self._leaving], {}
        await asyncio.gather(
            *(node_connection.connection.close() for node_connection in connections),
            *self._tasks,
            return_exceptions=True,
        )

    # commands

    def submit(self, command: Command, node_of: str | None = None) -> asyncio.Future[Any]:
        """Send a command to the node that serves its first key, or the key `node_of` if that is given."""
        slot = slot_of(command, node_of)
        outer: asyncio.Future[Any] = self._loop.create_future()
        node = self._topology.serving(slot)
        if self._closed:
            outer.set_exception(ConnectionLost("the connection was closed"))
        elif node is None:
            self._start_retry(command, slot, outer, None, ClusterDownError(f"no node serves slot {slot}"))
        else:
            self._send(command, slot, outer, node)
        return outer

    def submit_to(self, node: Node, command: Command) -> asyncio.Future[Any]:
        """Send a command to this node, regardless of its keys."""
        if self._closed:
            future: asyncio.Future[Any] = self._loop.create_future()
            future.set_exception(ConnectionLost("the connection was closed"))
            return future
        return self._connection_to(node).submit(command)

    def submit_everywhere(self, command: Command) -> list[asyncio.Future[Any]]:
        """Send a command to every primary."""
        return [self.submit_to(node, command) for node in self._topology.primaries]

    def _send(self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node) -> None:
        inner = self._connection_to(node).submit(command)

        def answered(inner: asyncio.Future[Any]) -> None:
            if inner.cancelled():
                outer.cancel()
                return
            error = inner.exception()
            if outer.done():
                return
            if error is None:
                outer.set_result(inner.result())
            elif is_transient(error) and not self._closed:
                self._start_retry(command, slot, outer, node, error)
            else:
                self._check_lost(node, error)
                outer.set_exception(error)

        def on_cancelled(outer: asyncio.Future[Any]) -> None:
            if outer.cancelled():
                inner.cancel()

        inner.add_done_callback(answered)
        outer.add_done_callback(on_cancelled)

    def _start_retry(
        self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node | None, error: BaseException
    ) -> None:
        task = self._spawn(self._retry(command, slot, outer, node, error))
        # In a callback, because a task that is cancelled before its start executes no code.
        task.add_done_callback(lambda _: _fail(outer, ConnectionLost("the connection was closed")))

    async def _retry(
        self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node | None, error: BaseException
    ) -> None:
        """Follow redirections and wait out refusals until there is a reply. error: the reply of `node`."""
        policy = RedirectPolicy(slot)
        try:
            while not outer.done():
                await asyncio.sleep(policy.pause(error))
                node, asking = await self.next_node(slot, node, error)
                if outer.done():
                    return
                if node is None:
                    continue
                try:
                    reply = await self._submit(command, node, asking)
                except (ResponseError, *_LOST) as failed:
                    self._check_lost(node, failed)
                    error = failed
                else:
                    _resolve(outer, reply)
        except Exception as last:  # noqa: BLE001 - every error belongs to the caller
            _fail(outer, last)

    def _submit(self, command: Command, node: Node, asking: bool) -> asyncio.Future[Any]:
        node_connection = self._connection_to(node)
        if asking:
            # Both are submitted in one tick, so they are adjacent on the connection: ASKING applies to the next command
            # only. If the connection breaks between them, the second is redirected once more.
            node_connection.submit(("ASKING",)).add_done_callback(_consume_error)
        return node_connection.submit(command)

    # topology

    def serving(self, key: str) -> Node | None:
        """Return the node that serves a key, as far as is known."""
        return self._topology.serving(slot_of((), key))

    def reachable(self) -> list[Node]:
        """Return all primaries in random order, with those that failed recently at the end."""
        return in_random_order(self._topology.primaries, self._suspects)

    def connected(self) -> list[Node]:
        """Return all primaries as `reachable` does, and nodes without a slot that a redirection has named."""
        primaries = self.reachable()
        return [*primaries, *(self._connections.keys() - set(primaries))]

    def redirected(self, error: AskError, asked: Node) -> Node:
        """Return the node that a redirection names; MOVED also updates the topology."""
        if not isinstance(error, MovedError):
            return target(error, asked)
        _ = self._start_discovery()  # other slots may have moved as well
        return self._topology.moved(error, asked)

    async def next_node(self, slot: int | None, node: Node | None, error: BaseException) -> tuple[Node | None, bool]:
        """Return the node for a command that `node` refused with `error`, and whether ASKING must precede it.

        The node is None if none is known to serve the slot.
        """
        if isinstance(error, AskError) and node is not None:
            return self.redirected(error, node), not isinstance(error, MovedError)
        if not isinstance(error, TryAgainError):
            await self.refresh()
        return self._topology.serving(slot), False

    def mark_failed(self, node: Node) -> None:
        """Report a broken connection to the node, which may have been replaced."""
        self._failures[node] = RUNTIME.monotonic()
        _ = self._start_discovery()

    @property
    def _suspects(self) -> set[Node]:
        """Nodes that failed recently; they are asked last."""
        since = RUNTIME.monotonic() - self._timings.suspicion
        self._failures = {node: when for node, when in self._failures.items() if when > since}
        return set(self._failures)

    async def refresh(self) -> None:
        """Discover the topology again; keep the known one if no node answers."""
        await asyncio.wait([self._start_discovery()])

    def _start_discovery(self) -> asyncio.Task[None]:
        if self._discovery is None or self._discovery.done():
            self._discovery = self._spawn(self._refresh())
        return self._discovery

    async def _refresh(self) -> None:
        known = in_random_order(self._topology.nodes, self._suspects)
        seeds = [node for node in self._address.nodes if node not in known]
        try:
            topology = await self._discover([*known, *seeds])
        except QueueError:
            pass
        else:
            self._adopt(topology)
        await asyncio.sleep(self._timings.between_discoveries)

    async def _watch_silence(self) -> None:
        """Detect nodes that stop answering and keep their connections open, long before commands time out."""
        while True:
            await asyncio.sleep(self._timings.silence)
            silent_since = RUNTIME.monotonic() - self._timings.silence
            for node, node_connection in self._connections.items():
                if node_connection.outstanding and node_connection.last_reply <= silent_since:
                    self.mark_failed(node)

    async def _discover(self, nodes: Iterable[Node], *, check: bool = False) -> Topology:
        return await anyio.to_thread.run_sync(
            lambda: self._discover_from(self._address, nodes, timeout=self._timings.discovery, check=check),
            abandon_on_cancel=True,
        )

    def _adopt(self, topology: Topology) -> None:
        self._topology = topology
        for node in self._connections.keys() - topology.primaries:
            node_connection = self._connections.pop(node)
            self._leaving.add(node_connection)
            _ = self._spawn(self._retire(node_connection))

    def _check_lost(self, node: Node, error: BaseException) -> None:
        if isinstance(error, _LOST):
            self.mark_failed(node)

    # connections

    def _connection_to(self, node: Node) -> _NodeConnection:
        node_connection = self._connections.get(node)
        if node_connection is None:
            node_connection = self._connections[node] = _NodeConnection(self._dial(node))
        return node_connection

    async def _retire(self, node_connection: _NodeConnection) -> None:
        """Close the connection to a node that has left, after its outstanding commands are answered."""
        if node_connection.outstanding:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timings.drain):
                    await node_connection.idle.wait()
        await node_connection.connection.close()
        self._leaving.discard(node_connection)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="perdure cluster")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _resolve(future: asyncio.Future[Any], reply: Any) -> None:
    if not future.done():
        future.set_result(reply)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _consume_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class SyncClusterConnection:
    """Synchronous connections to the primaries of a cluster, for one thread at a time."""

    def __init__(self, address: Address, timeout: float) -> None:
        """timeout: seconds that one call may take, redirections included."""
        self._address = address
        self._timeout = timeout
        self._topology = Topology.unknown()
        self._clients: dict[Node, redis.Redis] = {}
        self._suspects: set[Node] = set()
        self._stale = True

    def execute(self, key: str, *command: Argument) -> Any:
        """Execute a command on the node that serves `key`. Raises the client library's errors."""
        slot = slot_of(command, key)
        policy = RedirectPolicy(slot)
        deadline = RUNTIME.monotonic() + self._timeout
        node, asking = self._find(slot), False
        while True:
            try:
                return self._ask(node, command, asking)
            except (redis.ConnectionError, redis.TimeoutError, OSError):
                self._suspects.add(node)
                self._stale = True
                raise
            except ResponseError as error:
                pause = policy.pause(error)
                if RUNTIME.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                node, asking = self._next_node(slot, node, error)

    def _next_node(self, slot: int | None, node: Node, error: ResponseError) -> tuple[Node, bool]:
        self._stale = self._stale or not isinstance(error, TryAgainError)
        if isinstance(error, MovedError):
            return self._topology.moved(error, node), False
        if isinstance(error, AskError):
            return target(error, node), True
        self.refresh()
        return self._find(slot), False

    def is_suspect(self, key: str) -> bool:
        """Whether the node that serves `key` did not answer the last command."""
        return self._topology.serving(slot_of((), key)) in self._suspects

    def refresh(self) -> None:
        """Discover the topology again if it may have changed; keep the known one if no node answers."""
        if not self._stale:
            return
        known = in_random_order(self._topology.nodes, self._suspects)
        try:
            self._topology = discover_topology(
                self._address, [*known, *self._address.nodes], timeout=min(1.0, self._timeout / 2)
            )
        except QueueError:
            return
        self._stale = False
        self._suspects &= self._topology.primaries
        for node in self._clients.keys() - self._topology.primaries:
            self._clients.pop(node).close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _find(self, slot: int | None) -> Node:
        node = self._topology.serving(slot)
        if node is None:
            self._stale = True
            self.refresh()
            node = self._topology.serving(slot)
        if node is None:
            raise ClusterDownError(f"no node serves slot {slot}")
        return node

    def _ask(self, node: Node, command: tuple[Argument, ...], asking: bool) -> Any:
        if node not in self._clients:
            self._clients[node] = sync_client(self._address, None, timeout=self._timeout, node=node)
        client = self._clients[node]
        if asking:  # only this thread uses the connection, so the two stay adjacent
            client.execute_command("ASKING")
        reply = client.execute_command(*command)
        self._suspects.discard(node)
        return reply
