"""Which node serves which hash slot, as the cluster tells it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from redis.exceptions import MovedError, NoPermissionError, ResponseError

from ...errors import Refused, Unavailable
from ..address import Address, Node
from ..clients import check_server, sync_client, translated

__all__ = ["SLOTS", "Topology", "discover_topology"]

SLOTS: Final = 16384


class Topology:
    """The primaries of a cluster. Changes in one way only: by a redirection that says where a slot is now."""

    def __init__(self, slots: Sequence[Node | None], nodes: Iterable[Node] = ()) -> None:
        """slots: who serves each. nodes: all that are known, replicas among them."""
        self._slots = list(slots)
        self.nodes = frozenset(nodes)

    @classmethod
    def unknown(cls) -> Topology:
        return cls([None] * SLOTS)

    @classmethod
    def read(cls, reply: Sequence[Any], asked: Node) -> Topology:
        """Read the reply to CLUSTER SLOTS. A node without a name is reached by the name of the one that was asked."""
        slots: list[Node | None] = [None] * SLOTS
        nodes: set[Node] = set()
        for first, last, *servers in reply:
            found = [_node(server, asked) for server in servers]
            nodes.update(node for node in found if node is not None)
            slots[first : last + 1] = [found[0]] * (last + 1 - first)
        return cls(slots, nodes)

    @property
    def primaries(self) -> frozenset[Node]:
        return frozenset(node for node in self._slots if node is not None)

    def serving(self, slot: int | None) -> Node | None:
        """Who serves the slot; with None, whoever serves the first slot that is served at all."""
        if slot is None:
            return next((node for node in self._slots if node is not None), None)
        return self._slots[slot]

    def moved(self, error: MovedError, asked: Node) -> Node:
        """Note where a slot is now, by the redirection with which `asked` answered."""
        node = target(error, asked)
        self._slots[error.slot_id] = node
        return node


def target(error: Any, asked: Node) -> Node:
    """Where a MOVED or ASK points to. An empty host means the one that was asked."""
    return Node(error.host or asked.host, error.port)


def _node(server: Sequence[Any], asked: Node) -> Node | None:
    name = (server[0] or b"").decode()
    return None if name == "?" else Node(name or asked.host, int(server[1]))


def discover_topology(address: Address, candidates: Iterable[Node], *, timeout: float, check: bool = False) -> Topology:
    """Ask the first of these nodes that answers; blocks for up to `timeout` seconds per node that does not.

    check: also whether the server is one that Perdure can use. Raises `Unavailable` or `Refused`.
    """
    silent: list[str] = []
    for node in candidates:
        try:
            found = _ask(address, node, timeout, check)
        except Unavailable as error:
            silent.append(f"{node}: {str(error.__cause__ or error).rstrip('.')}")
        else:
            if found.primaries or check:
                return found
            silent.append(f"{node}: it knows no primary")
    raise Unavailable(f"cannot reach any node of {address.shown}: {'; '.join(silent)}")


def in_random_order(nodes: Iterable[Node], last: Iterable[Node] = ()) -> list[Node]:
    """Nodes to ask, so that not every client asks the same one; `last` those that are perhaps gone."""
    doubtful = set(last)
    return sorted(nodes, key=lambda node: (node in doubtful, random.random()))  # noqa: S311 - load, not a secret


def _ask(address: Address, node: Node, timeout: float, check: bool) -> Topology:
    client = sync_client(address, None, timeout=timeout, node=node)
    try:
        with translated(address.shown):
            if check:
                _check(client, address)
            reply: Any = client.execute_command("CLUSTER", "SLOTS")
    except Refused as error:
        if "cluster support disabled" in str(error):
            scheme = "rediss" if address.encrypted else "redis"
            raise Refused(f"{address.shown} is one server and not a Redis Cluster: write {scheme}://") from error
        raise
    finally:
        client.close()
    return Topology.read(reply, node)


def _check(client: Any, address: Address) -> None:
    try:
        info = client.execute_command("INFO", "server")
    except NoPermissionError:
        return  # a managed server may hide INFO; what is too old will refuse its first command
    except ResponseError as error:
        if "permission" not in str(error).lower():
            raise
        return
    check_server(address, info)
