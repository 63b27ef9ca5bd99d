"""The wire of a cluster: each command goes to the node that serves its key, and follows the key when it moves.

One wire per primary, opened when it is first needed and closed when the node has left. A redirection (MOVED, ASK) and
a refusal that will pass (TRYAGAIN, CLUSTERDOWN, LOADING, READONLY) say that the command was not carried out, so it is
sent again even where it is not repeatable; after a few seconds its caller gets the last word. A lost connection is the
caller's at once, since nobody can tell what was carried out; it makes the wire look who serves what now.

Commands that one caller awaits one after another stay in order. Of those submitted together, the ones for one node
stay in order unless one of them is redirected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio.to_thread
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as ReplyTimeout

from ...errors import QueueError
from ..address import Address, Node
from ..pipelining import Command, CommandConnection
from .hash_slots import slot_of
from .redirects import RedirectPolicy, will_pass
from .topology import Topology, discover_topology, in_random_order, target

__all__ = ["ClusterConnection"]

_BETWEEN_LOOKS: Final = 0.1
"""Seconds between two looks at the topology, so that a storm of redirections does not become one of questions."""

_ANSWERING: Final = 1.0
"""Seconds that a node has to say what it knows of the topology."""

_FAREWELL: Final = 1.0
"""Seconds for which commands under way on a node that has left may still be answered."""

_SILENCE: Final = 2.0
"""Seconds without an answer after which a node with commands under way is looked after: it may have been replaced."""

_DOUBT: Final = 10.0
"""Seconds for which a node that was lost is asked after the others."""

_LOST = (ConnectionLost, ReplyTimeout, OSError)


@dataclass(slots=True, eq=False)
class _NodeConnection:
    """The wire to one node, and how many of its commands are not answered yet."""

    wire: CommandConnection
    under_way: int = 0
    heard: float = 0.0
    """When it answered last, or was first asked after a rest (seconds of the monotonic clock)."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, command: Command) -> asyncio.Future[Any]:
        if not self.under_way:
            self.heard = time.monotonic()
        self.under_way += 1
        self.idle.clear()
        future = self.wire.submit(command)
        future.add_done_callback(self._answered)
        return future

    def _answered(self, _: asyncio.Future[Any]) -> None:
        self.under_way -= 1
        self.heard = time.monotonic()
        if not self.under_way:
            self.idle.set()


class ClusterConnection:
    """Commands of many callers on one connection per primary."""

    def __init__(
        self,
        address: Address,
        dial: Callable[[Node], CommandConnection],
        *,
        learn: Callable[..., Topology] = discover_topology,
    ) -> None:
        """dial: makes the wire to one node. learn: asks some nodes, in a thread, who serves what."""
        self._address = address
        self._dial = dial
        self._ask = learn
        self._topology = Topology.unknown()
        self._lines: dict[Node, _NodeConnection] = {}
        self._leaving: set[_NodeConnection] = set()
        self._losses: dict[Node, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def open(self) -> None:
        """Learn who serves what, from any node that the address names; checks that it can be used at all."""
        self._take(await self._learn(in_random_order(self._address.nodes), check=True))
        _ = self._spawn(self._watch())

    def flush(self) -> None:
        for line in self._lines.values():
            line.wire.flush()

    def reconnect(self) -> None:
        """Look who serves what: a server that refused to write is somebody's replica now."""
        _ = self._look_soon()

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        lines, self._lines = [*self._lines.values(), *self._leaving], {}
        await asyncio.gather(*(line.wire.close() for line in lines), *self._tasks, return_exceptions=True)

    # commands

    def submit(self, command: Command, node_of: str | None = None) -> asyncio.Future[Any]:
        """Send a command to the node that serves its first key, or `node_of` where that is given."""
        slot = slot_of(command, node_of)
        outer: asyncio.Future[Any] = self._loop.create_future()
        node = self._topology.serving(slot)
        if self._closed:
            outer.set_exception(ConnectionLost("the connection was closed"))
        elif node is None:
            self._begin_pursuit(command, slot, outer, None, ClusterDownError(f"no node serves slot {slot}"))
        else:
            self._send(command, slot, outer, node)
        return outer

    def submit_to(self, node: Node, command: Command) -> asyncio.Future[Any]:
        """Send a command to one node, whatever its keys are."""
        if self._closed:
            future: asyncio.Future[Any] = self._loop.create_future()
            future.set_exception(ConnectionLost("the connection was closed"))
            return future
        return self._line(node).submit(command)

    def submit_everywhere(self, command: Command) -> list[asyncio.Future[Any]]:
        """Send a command to every primary."""
        return [self.submit_to(node, command) for node in self._topology.primaries]

    def _send(self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node) -> None:
        inner = self._line(node).submit(command)

        def answered(inner: asyncio.Future[Any]) -> None:
            if inner.cancelled():
                outer.cancel()
                return
            error = inner.exception()
            if outer.done():
                return
            if error is None:
                outer.set_result(inner.result())
            elif will_pass(error) and not self._closed:
                self._begin_pursuit(command, slot, outer, node, error)
            else:
                self._note(node, error)
                outer.set_exception(error)

        def given_up(outer: asyncio.Future[Any]) -> None:
            if outer.cancelled():
                inner.cancel()

        inner.add_done_callback(answered)
        outer.add_done_callback(given_up)

    def _begin_pursuit(
        self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node | None, error: BaseException
    ) -> None:
        task = self._spawn(self._pursue(command, slot, outer, node, error))
        # Not within the task: one that is cancelled before it began does nothing at all.
        task.add_done_callback(lambda _: _fail(outer, ConnectionLost("the connection was closed")))

    async def _pursue(
        self, command: Command, slot: int | None, outer: asyncio.Future[Any], node: Node | None, error: BaseException
    ) -> None:
        """Follow redirections and sit refusals out, until there is a reply. error: what `node` answered."""
        pursuit = RedirectPolicy(slot)
        try:
            while not outer.done():
                await asyncio.sleep(pursuit.pause(error))
                node, asking = await self.next_node(slot, node, error)
                if outer.done():
                    return
                if node is None:
                    continue
                try:
                    reply = await self._submit(command, node, asking)
                except (ResponseError, *_LOST) as failed:
                    self._note(node, failed)
                    error = failed
                else:
                    _give(outer, reply)
        except Exception as last:  # noqa: BLE001 - whatever it is, it is the caller's
            _fail(outer, last)

    def _submit(self, command: Command, node: Node, asking: bool) -> asyncio.Future[Any]:
        line = self._line(node)
        if asking:
            # Submitted in one go, so next to each other on the connection: ASKING counts for the next command alone.
            # Should the connection break between them, the second is redirected once more.
            line.submit(("ASKING",)).add_done_callback(_heard)
        return line.submit(command)

    # who serves what

    def serving(self, key: str) -> Node | None:
        """The node that serves a key, as far as is known."""
        return self._topology.serving(slot_of((), key))

    def reachable(self) -> list[Node]:
        """All primaries in random order, the ones that were lost lately at the end."""
        return in_random_order(self._topology.primaries, self._doubtful)

    def redirected(self, error: AskError, asked: Node) -> Node:
        """Where a redirection points to; a slot that has moved for good is noted."""
        if not isinstance(error, MovedError):
            return target(error, asked)
        _ = self._look_soon()  # where one slot went, others may have gone
        return self._topology.moved(error, asked)

    async def next_node(self, slot: int | None, node: Node | None, error: BaseException) -> tuple[Node | None, bool]:
        """Where a command goes after `node` refused it with `error`, and whether it must be announced by ASKING.

        None where no node is known to serve the slot.
        """
        if isinstance(error, AskError) and node is not None:
            return self.redirected(error, node), not isinstance(error, MovedError)
        if not isinstance(error, TryAgainError):
            await self.look()
        return self._topology.serving(slot), False

    def mark_failed(self, node: Node) -> None:
        """A connection to the node broke: somebody else may have taken its place."""
        self._losses[node] = time.monotonic()
        _ = self._look_soon()

    @property
    def _doubtful(self) -> set[Node]:
        """Nodes that were lost lately: others are asked before them."""
        since = time.monotonic() - _DOUBT
        self._losses = {node: when for node, when in self._losses.items() if when > since}
        return set(self._losses)

    async def look(self) -> None:
        """Learn anew who serves what; keeps what is known where no node answers."""
        await asyncio.wait([self._look_soon()])

    def _look_soon(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look())
        return self._looking

    async def _look(self) -> None:
        known = in_random_order(self._topology.nodes, self._doubtful)
        seeds = [node for node in self._address.nodes if node not in known]
        try:
            topology = await self._learn([*known, *seeds])
        except QueueError:
            pass
        else:
            self._take(topology)
        await asyncio.sleep(_BETWEEN_LOOKS)

    async def _watch(self) -> None:
        """Notice nodes that fall silent without closing their connections, long before their commands time out."""
        while True:
            await asyncio.sleep(_SILENCE)
            late = time.monotonic() - _SILENCE
            for node, line in self._lines.items():
                if line.under_way and line.heard <= late:
                    self.mark_failed(node)

    async def _learn(self, nodes: Iterable[Node], *, check: bool = False) -> Topology:
        return await anyio.to_thread.run_sync(
            lambda: self._ask(self._address, nodes, timeout=_ANSWERING, check=check), abandon_on_cancel=True
        )

    def _take(self, topology: Topology) -> None:
        self._topology = topology
        for node in self._lines.keys() - topology.primaries:
            line = self._lines.pop(node)
            self._leaving.add(line)
            _ = self._spawn(self._retire(line))

    def _note(self, node: Node, error: BaseException) -> None:
        if isinstance(error, _LOST):
            self.mark_failed(node)

    # lines

    def _line(self, node: Node) -> _NodeConnection:
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _NodeConnection(self._dial(node))
        return line

    async def _retire(self, line: _NodeConnection) -> None:
        """Close the wire to a node that has left, once what is under way there is answered."""
        if line.under_way:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await line.idle.wait()
        await line.wire.close()
        self._leaving.discard(line)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="perdure cluster")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _give(future: asyncio.Future[Any], reply: Any) -> None:
    if not future.done():
        future.set_result(reply)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
