"""Topology of a cluster: the node of each hash slot, by CLUSTER SLOTS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from redis.exceptions import MovedError, NoPermissionError, ResponseError

from ...errors import Refused, Unavailable
from ...runtime import RUNTIME
from ..address import Address, Node
from ..clients import START_REMEDY, sync_client, translated
from ..server_check import check_kind

SLOTS: Final = 16384


class Topology:
    """The node of each hash slot. Only a redirection changes it in place; a new discovery replaces it."""

    def __init__(self, slots: Sequence[Node | None], nodes: Iterable[Node] = ()) -> None:
        """slots: the primary of each slot. nodes: all known nodes, including replicas."""
        self._slots = list(slots)
        self.nodes = frozenset(nodes)

    @classmethod
    def unknown(cls) -> Topology:
        return cls([None] * SLOTS)

    @classmethod
    def read(cls, reply: Sequence[Any], asked: Node) -> Topology:
        """Parse the reply to CLUSTER SLOTS. A node without a host name is reached at that of the asked node."""
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
        """Return the node of the slot; for None, that of the first slot that has one."""
        if slot is None:
            return next((node for node in self._slots if node is not None), None)
        return self._slots[slot]

    def moved(self, error: MovedError, asked: Node) -> Node:
        """Record and return the new node of a slot, from the redirection that `asked` replied."""
        node = target(error, asked)
        self._slots[error.slot_id] = node
        return node


def target(error: Any, asked: Node) -> Node:
    """Return the node that a MOVED or ASK names; an empty host means that of the asked node."""
    return Node(error.host or asked.host, error.port)


def _node(server: Sequence[Any], asked: Node) -> Node | None:
    name = (server[0] or b"").decode()
    return None if name == "?" else Node(name or asked.host, int(server[1]))


def discover_topology(address: Address, candidates: Iterable[Node], *, timeout: float, check: bool = False) -> Topology:
    """Return the topology as the first node that answers reports it. Raises `Unavailable` or `Refused`.

    Args:
        timeout: seconds that the call blocks for each node that does not answer.
        check: whether to check version and kind of the server as well.
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
            silent.append(f"{node}: it does not know any primary")
    raise Unavailable(f"cannot reach any node of {address.shown}: {'; '.join(silent)}", START_REMEDY)


def in_random_order(nodes: Iterable[Node], last: Iterable[Node] = ()) -> list[Node]:
    """Return the nodes in random order, so that clients ask different ones, with the suspects `last` at the end."""
    suspects = set(last)
    return sorted(nodes, key=lambda node: (node in suspects, RUNTIME.uniform(0, 1)))


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
        return  # managed servers may forbid INFO; one that is too old refuses the first script
    except ResponseError as error:
        if "permission" not in str(error).lower():
            raise
        return
    check_kind(address, info)
