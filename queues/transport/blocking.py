"""Reads that block: on a connection of their own, which can be told from outside to wait no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import anyio
import redis.asyncio
from redis.exceptions import ClusterDownError, ResponseError

from ..errors import Unavailable
from .address import Node
from .clients import translated
from .cluster import ClusterConnection, RedirectPolicy, slot_of
from .pipelining import Argument

__all__ = ["BlockingConnection"]

_PATIENCE: Final = 1.0
"""Seconds that a server has to end a read; then the connection is broken off, so that it holds up no other read."""

Dial = Callable[[Node | None], redis.asyncio.Redis]
Unblock = Callable[[int, Node | None], Awaitable[Any]]


class BlockingConnection:
    """One connection for reads that block, and the way to end such a read from outside. One read at a time."""

    def __init__(
        self,
        shown: str,
        dial: Dial,
        unblock: Unblock,
        *,
        cluster: ClusterConnection | None = None,
        key: str | None = None,
        borrowed: bool = False,
    ) -> None:
        """dial: makes a client of one connection, in a cluster to a node. unblock: ends a wait, by the client's id.

        cluster, key: follow the node that serves the key. borrowed: the client is somebody else's to close.
        """
        self._shown = shown
        self._dial = dial
        self._unblock = unblock
        self._cluster = cluster
        self._key = key
        self._borrowed = borrowed
        self._client: redis.asyncio.Redis | None = None
        self._node: Node | None = None
        self._client_id: int | None = None
        self._interrupted = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    async def read(self, *command: Argument) -> Any:
        """Carry out one blocking read. Not repeatable: `Unavailable` means that the reply may be lost.

        None where it was interrupted before anything came.
        """
        self._interrupted.clear()
        self._over.clear()
        try:
            with translated(self._shown):
                return await self._follow(command)
        except Unavailable:
            await self._disconnect()  # else a server that was demoted would be asked again
            raise
        except BaseException:
            self._client_id = None
            raise
        finally:
            self._over.set()

    async def _follow(self, command: tuple[Argument, ...]) -> Any:
        """Read where the key is; in a cluster, follow it. A redirection says that nothing was read."""
        cluster, key = self._cluster, self._key
        if cluster is None or key is None:
            return await self._read_from(None, command, asking=False)
        slot = slot_of((), key)
        pursuit, node, asking = RedirectPolicy(slot), cluster.serving(key), False
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
            pause = pursuit.pause(error)  # raises where it will not pass
            with suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), pause)
            node, asking = await cluster.next_node(slot, node, error)
        return None

    async def _read_from(self, node: Node | None, command: tuple[Argument, ...], *, asking: bool) -> Any:
        if self._client is None or node != self._node:
            await self._disconnect()
            self._client, self._node = self._dial(node), node
        if self._client_id is None:
            self._client_id = int(await self._client.execute_command("CLIENT", "ID"))
        if self._interrupted.is_set():
            return None
        if asking:  # nobody else uses the connection, so nothing comes between the two
            await self._client.execute_command("ASKING")
        try:
            return await self._client.execute_command(*command)
        except ResponseError as refused:
            if str(refused).startswith("UNBLOCKED"):
                return None  # the stream has gone, perhaps to another node: nothing was read, and the next read tells
            raise

    async def interrupt(self) -> None:
        """End the read under way, as if nothing had come; what has come is returned to its caller.

        A read that is still being sent is told again until it has ended or waits, so that none is missed. Where the
        server does not answer, the read ends with `Unavailable`.
        """
        self._interrupted.set()
        with anyio.move_on_after(_PATIENCE):
            pause = 0.001
            while not self._over.is_set():
                if self._client_id is not None and await self._unblock(self._client_id, self._node):
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), pause)
                pause *= 2
        if not self._over.is_set() and self._client is not None:
            # The server does not answer. What it may have sent is found again among what is pending.
            await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        client, self._client, self._client_id = self._client, None, None
        if client is not None and not self._borrowed:
            with anyio.CancelScope(shield=True):
                await client.aclose()
