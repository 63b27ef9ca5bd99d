"""Real Redis Clusters for tests: every node is a process on loopback with its own folder and ports.

A cluster that tests only use is started once and shared; a test that kills nodes or moves slots away starts its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis.crc import key_slot

from tests.support.servers.nodes import BOUND, Node, free_ports, wait_for

SLOTS: Final = 16_384

NODE_TIMEOUT: Final = 1500
"""Milliseconds after which a silent node is taken for dead. A failover takes two to three times as long."""


@dataclass
class Cluster:
    """A cluster; by default of three primaries with one replica each."""

    program: Path
    primaries: int = 3
    replicas: int = 1
    options: tuple[str, ...] = ()
    """Further options of every node."""
    tls: tuple[str, ...] = ()
    """The nodes' certificates, as options; with them the nodes use TLS for clients and for each other."""
    client_options: dict[str, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def start(self) -> Cluster:
        try:
            count = self.primaries * (1 + self.replicas)
            self.nodes += [self._node(port) for port in free_ports(count, bus=True)]
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        with ExitStack() as stack:  # each is stopped, also if another cannot be
            for node in self.nodes:
                stack.callback(node.stop)

    def url(self, *, credentials: str = "", query: str = "", secure: bool = False) -> str:
        """Address with the first two living nodes; the client finds the others."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.living[:2])
        return f"redis{'s' if secure else ''}+cluster://{credentials}{hosts}{query}"

    # roles

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def owner(self, slot: int, *, asked: Node | None = None) -> Node:
        """Return the node that serves the slot, in the view of `asked` (default: any living node)."""
        for first, last, primary, *_ in (asked or self.living[0]).command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.node(primary[2].decode())
        raise AssertionError(f"no node serves slot {slot}")

    def node(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.id == node_id)

    def serving(self) -> list[Node]:
        """Return the primaries that serve slots, in the view of a living node."""
        found = self.living[0].command("CLUSTER", "SLOTS")
        return list({primary[2]: self.node(primary[2].decode()) for _, _, primary, *_ in found}.values())

    def replicas_of(self, primary: Node) -> list[Node]:
        """Return the replicas of a primary, in its own view."""
        slots = primary.command("CLUSTER", "SLOTS")
        mine = [replicas for _, _, server, *replicas in slots if server[2].decode() == primary.id]
        return list({replica[2]: self.node(replica[2].decode()) for replicas in mine for replica in replicas}.values())

    # faults and moves

    def flush(self) -> None:
        """Empty every primary, of a private cluster."""
        for node in self.serving():
            node.command("FLUSHALL")

    def kill_primary(self, slot: int) -> Node:
        """Send SIGKILL to the node that serves the slot, and return it without waiting for a failover."""
        victim = self.owner(slot)
        victim.server.kill()
        return victim

    def failed_over(self, slot: int, victim: Node) -> Node:
        """Wait until all living nodes agree that another node serves the slot; return that node."""
        wait_for(lambda: all(self.owner(slot, asked=node) is not victim for node in self.living), "a failover")
        wait_for(self._serves, "the cluster to serve again")
        return self.owner(slot)

    def restart(self, node: Node) -> None:
        """Start a killed node again, as a replica if another node took its place; wait for its replication link."""
        node.start()
        wait_for(self._linked, "the node's replication")

    def migrate(self, slot: int, target: Node) -> Migration:
        """Return the migration of a slot, which the test carries out step by step."""
        return Migration(self, slot, self.owner(slot), target)

    def move_slot(self, slot: int, target: Node) -> None:
        """Move a slot with all its keys, as `redis-cli --cluster reshard` does."""
        source = self.owner(slot)
        if source is target:
            return
        move = Migration(self, slot, source, target)
        move.begin()
        move.keys()
        move.finish()

    # creation

    def add_primary(self) -> Node:
        """Add a primary that serves no slot yet, to a private cluster."""
        (port,) = free_ports(1, bus=True)
        first, node = self.nodes[0], self._node(port)
        self.nodes.append(node)
        node.start()
        node.command("CLUSTER", "MEET", "127.0.0.1", first.port)
        wait_for(lambda: all(self._known_by(one) == len(self.nodes) for one in self.nodes), "the nodes to meet")
        wait_for(self._serves, "the cluster to serve")
        return node

    def _node(self, port: int) -> Node:
        own = [
            *("--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--cluster-announce-ip", "127.0.0.1", "--cluster-node-timeout", str(NODE_TIMEOUT)),
            *("--cluster-replica-validity-factor", "0", "--save", "", "--appendonly", "no"),
            *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
            *("--repl-ping-replica-period", "1"),  # a replica is listed once it knows an offset
        ]
        if self.tls:
            own += ["--tls-port", str(port), "--tls-cluster", "yes", "--tls-replication", "yes", *self.tls]
        else:
            own += ["--port", str(port)]
        return Node(self.program, port, [*own, *self.options], self.client_options)

    def _join(self) -> None:
        first, *others = self.nodes
        for epoch, node in enumerate(self.nodes, 1):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in others:
            node.command("CLUSTER", "MEET", "127.0.0.1", first.port)
        wait_for(lambda: all(self._known_by(node) == len(self.nodes) for node in self.nodes), "the nodes to meet")
        primaries, replicas = self.nodes[: self.primaries], self.nodes[self.primaries :]
        for number, node in enumerate(primaries):
            share = range(number * SLOTS // len(primaries), (number + 1) * SLOTS // len(primaries))
            node.command("CLUSTER", "ADDSLOTS", *share)
        for number, node in enumerate(replicas):
            node.command("CLUSTER", "REPLICATE", primaries[number % len(primaries)].id)
        wait_for(self._serves, "the cluster to serve")
        wait_for(self._linked, "the replicas")

    def _known_by(self, node: Node) -> int:
        lines = node.command("CLUSTER", "NODES").decode().splitlines()
        return sum("handshake" not in line and " connected" in line for line in lines)

    def _serves(self) -> bool:
        def says_so(node: Node) -> bool:
            lines = node.command("CLUSTER", "INFO").decode().splitlines()
            return "cluster_state:ok" in lines and f"cluster_slots_ok:{SLOTS}" in lines

        return all(says_so(node) for node in self.living)

    def _linked(self) -> bool:
        """Return whether every living replica follows its primary, and every living node knows of it."""
        serving = self.serving()
        following = [node for node in self.living if node not in serving]
        if any(node.info("replication").get("master_link_status") != "up" for node in following):
            return False
        followers = {node.id.encode() for node in following}
        return self._serves() and all(
            _replicas_in(node.command("CLUSTER", "SLOTS")) == followers for node in self.living
        )


def _replicas_in(slots: list[Any]) -> set[bytes]:
    return {replica[2] for _, _, _, *replicas in slots for replica in replicas}


@dataclass
class Migration:
    """Migration of one slot: ASK redirections while its keys move, MOVED afterwards."""

    cluster: Cluster
    slot: int
    source: Node
    target: Node

    def begin(self) -> None:
        self.target.command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.id)
        self.source.command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target.id)

    def keys(self, most: int | None = None) -> int:
        """Move all keys of the slot, or a maximum number; return the number of moved keys."""
        moved = 0
        while most is None or moved < most:
            count = 64 if most is None else min(64, most - moved)
            names = self.source.command("CLUSTER", "GETKEYSINSLOT", self.slot, count)
            if not names:
                break
            self.move(*names)
            moved += len(names)
        return moved

    def move(self, *names: str | bytes) -> None:
        """Move these keys of the slot."""
        password = ("AUTH", self.source.password) if self.source.password else ()
        target = ("127.0.0.1", self.target.port, "", 0, round(BOUND * 1000))
        self.source.command("MIGRATE", *target, *password, "KEYS", *names)

    def finish(self) -> None:
        """Transfer the slot: notify the new owner first, so that the slot always has an owner."""
        others = [node for node in self.cluster.serving() if node not in (self.source, self.target)]
        for node in (self.target, self.source, *others):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", self.target.id)
        # An older message of the source may change the mind of a node, until it has heard of the target's new epoch.
        wait_for(
            lambda: all(self.cluster.owner(self.slot, asked=node) is self.target for node in self.cluster.living),
            "all nodes to know the slot's new owner",
        )


def slot_of(key: str) -> int:
    """Return the slot of a key, by its hash tag."""
    return int(key_slot(key.encode()))


@contextmanager
def private_cluster(program: Path, **options: Any) -> Iterator[Cluster]:
    """Start a cluster for one test, which may change it."""
    cluster = Cluster(program, **options)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
