"""Synchronous cluster client for a thread without an event loop."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError

from ...errors import QueueError
from ...runtime import RUNTIME
from ..address import Address, Node
from ..clients import sync_client
from ..pipelining import Argument
from .hash_slots import slot_of
from .redirects import RedirectPolicy
from .topology import Topology, discover_topology, in_random_order, target


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
