"""Blocking reads on a dedicated connection, which another task can interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import redis.asyncio
from redis.exceptions import ClusterDownError, ResponseError

from ..errors import Unavailable
from .address import Node
from .clients import translated
from .cluster.client import ClusterConnection
from .cluster.hash_slots import RedirectPolicy, slot_of
from .pipelining import Argument

Dial = Callable[[Node | None], redis.asyncio.Redis]
Unblock = Callable[[int, Node | None], Awaitable[Any]]


class BlockingConnection:
    """A connection for blocking reads, one at a time, with a method that interrupts the current one."""

    def __init__(
        self,
        shown: str,
        dial: Dial,
        unblock: Unblock,
        *,
        cluster: ClusterConnection | None = None,
        key: str | None = None,
        borrowed: bool = False,
        unblock_timeout: float = 1.0,
    ) -> None:
        """Args:
        dial: returns a client with one connection, in a cluster to a node.
        unblock: ends the blocked command of a client, given by its id.
        cluster, key: follow the node that serves the key.
        borrowed: whether another component closes the client.
        unblock_timeout: seconds that the server may take to end a read; then the connection is closed.
        """
        self._shown = shown
        self._dial = dial
        self._unblock = unblock
        self._cluster = cluster
        self._key = key
        self._borrowed = borrowed
        self._unblock_timeout = unblock_timeout
        self._client: redis.asyncio.Redis | None = None
        self._node: Node | None = None
        self._client_id: int | None = None
        self._interrupted = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    async def read(self, *command: Argument) -> Any:
        """Execute one blocking read, and return its reply, or None if it was interrupted.

        The read is not repeatable: after `Unavailable`, its reply may be lost.
        """
        self._interrupted.clear()
        self._over.clear()
        try:
            with translated(self._shown):
                return await self._follow(command)
        except Unavailable:
            await self._disconnect()  # else the next read would go to a server that was demoted
            raise
        except BaseException:
            self._client_id = None
            raise
        finally:
            self._over.set()

    async def _follow(self, command: tuple[Argument, ...]) -> Any:
        """Read from the node that serves the key, and follow redirections, after which nothing was read."""
        cluster, key = self._cluster, self._key
        if cluster is None or key is None:
            return await self._read_from(None, command, asking=False)
        slot = slot_of((), key)
        policy, node, asking = RedirectPolicy(slot), cluster.serving(key), False
        while not self._interrupted.is_set():
            error: Exception = ClusterDownError(f"no node serves {key}")
            if node is not None:
                try:
                    return await self._read_from(node, command, asking=asking)
                except ResponseError as refused:
                    error = refused
                except (redis.ConnectionError, redis.TimeoutError, OSError):
                    cluster.mark_failed(node)
                    raise
            pause = policy.pause(error)  # raises an error that is not transient
            with suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), pause)
            node, asking = await cluster.next_node(slot, node, error)
        return None

    async def _read_from(self, node: Node | None, command: tuple[Argument, ...], *, asking: bool) -> Any:
        if self._client is None or node != self._node:
            await self._disconnect()
            self._client, self._node = self._dial(node), node
        if self._client_id is None:
            client_id: Any = await self._client.execute_command("CLIENT", "ID")
            self._client_id = int(client_id)
        if self._interrupted.is_set():
            return None
        if asking:  # no other command uses this connection, so the two stay adjacent
            await self._client.execute_command("ASKING")
        try:
            return await self._client.execute_command(*command)
        except ResponseError as refused:
            if str(refused).startswith("UNBLOCKED"):
                return None  # the stream was deleted or moved to another node; the next read follows it
            raise

    async def interrupt(self) -> None:
        """End the current read. Its caller gets None, or the entries that have already arrived.

        The request is repeated until the read has ended, since a read that is still being sent cannot be unblocked yet.
        If the server does not answer, the read raises `Unavailable`.
        """
        self._interrupted.set()
        with anyio.move_on_after(self._unblock_timeout):
            pause = 0.001
            while not self._over.is_set():
                if self._client_id is not None and await self._unblock(self._client_id, self._node):
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), pause)
                pause *= 2
        if not self._over.is_set() and self._client is not None:
            # The server does not answer. Entries that it may have delivered are in the pending entries list.
            await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        client, self._client, self._client_id = self._client, None, None
        if client is not None and not self._borrowed:
            with anyio.CancelScope(shield=True):
                await client.aclose()
