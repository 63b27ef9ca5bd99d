"""Real Sentinels for tests: a primary with two replicas, and three sentinels that monitor them, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.servers.nodes import Node, free_ports, wait_for

SERVICE: Final = "jobs"
"""Service name of the servers that the sentinels monitor."""

QUORUM: Final = 2

DOWN_AFTER: Final = 1000
"""Milliseconds after which a silent primary is taken for dead."""


@dataclass
class Sentinels:
    """Sentinels and their servers; by default three sentinels, one primary and two replicas."""

    program: Path
    replicas: int = 2
    sentinels: int = 3
    options: tuple[str, ...] = ()
    """Further options of each monitored server."""
    servers: list[Node] = field(default_factory=list)
    watchers: list[Node] = field(default_factory=list)

    def start(self) -> Sentinels:
        try:
            ports = free_ports(1 + self.replicas + self.sentinels)
            self._start_servers(ports[: 1 + self.replicas])
            self._start_watchers(ports[1 + self.replicas :])
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        with ExitStack() as stack:  # each is stopped, also if another cannot be; the sentinels first
            for node in [*self.servers, *self.watchers]:
                stack.callback(node.stop)

    def url(self) -> str:
        """Address with all sentinels."""
        hosts = ",".join(f"127.0.0.1:{watcher.port}" for watcher in self.watchers)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def primary(self) -> Node:
        """Return the primary that the first living sentinel names."""
        watcher = next(watcher for watcher in self.watchers if watcher.alive)
        return self._named_by(watcher)

    def _named_by(self, watcher: Node) -> Node:
        _, port = watcher.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(node for node in self.servers if node.port == int(port))

    def kill_primary(self) -> Node:
        """Send SIGKILL to the primary, and return it without waiting for a failover."""
        victim = self.primary
        victim.server.kill()
        return victim

    def replace_primary(self) -> Node:
        """Promote a replica while the primary runs, as for maintenance; return the former primary."""
        former = self.primary
        self.watchers[0].command("SENTINEL", "FAILOVER", SERVICE)
        return former

    def demoted(self, node: Node) -> None:
        """Wait until a running former primary has become a replica."""
        wait_for(
            lambda: node.info("replication")["role"] == "slave" and _follows(node), "the demotion of the former primary"
        )

    def failed_over(self, victim: Node) -> Node:
        """Wait until every living sentinel names another primary which has that role; return it."""

        def agreed() -> bool:
            named = {self._named_by(watcher) for watcher in self.watchers if watcher.alive}
            return len(named) == 1 and victim not in named and named.pop().info("replication")["role"] == "master"

        wait_for(agreed, "the sentinels to name another primary")
        return self.primary

    def restart(self, node: Node) -> None:
        """Start a killed server again as a replica of the present primary, which sentinels do after ten seconds."""
        node.start()
        node.command("REPLICAOF", "127.0.0.1", self.primary.port)
        wait_for(lambda: _follows(node), "the server to replicate the primary")

    def _start_servers(self, ports: list[int]) -> None:
        for port in ports:
            own = [
                *("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"),
                *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
            ]
            if port != ports[0]:
                own += ["--replicaof", "127.0.0.1", str(ports[0])]
            self.servers.append(Node(self.program, port, [*own, *self.options], {}))
            self.servers[-1].start()
        replicas = self.servers[1:]
        wait_for(lambda: all(_follows(node) for node in replicas), "the replicas")

    def _start_watchers(self, ports: list[int]) -> None:
        for port in ports:
            watcher = Node(self.program, port, ["--bind", "127.0.0.1", "--port", str(port), "--sentinel"], {})
            watcher.server.config = watcher.server.folder / "sentinel.conf"
            watcher.server.config.write_text(
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} {QUORUM}\n"
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER}\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
                f"sentinel parallel-syncs {SERVICE} {self.replicas}\n"
            )
            self.watchers.append(watcher)
            watcher.start()
        wait_for(lambda: all(self._sees_all(watcher) for watcher in self.watchers), "the sentinels to meet")

    def _sees_all(self, watcher: Node) -> bool:
        flat = watcher.command("SENTINEL", "MASTER", SERVICE)
        state = dict(zip(flat[::2], flat[1::2], strict=True))
        seen = int(state[b"num-slaves"]), int(state[b"num-other-sentinels"])
        return seen == (self.replicas, self.sentinels - 1) and state[b"flags"] == b"master"


def _follows(node: Node) -> bool:
    return node.info("replication").get("master_link_status") == "up"


@contextmanager
def private_sentinels(program: Path, **options: Any) -> Iterator[Sentinels]:
    """Start sentinels with a primary and replicas for one test, which may change them."""
    sentinels = Sentinels(program, **options)
    try:
        yield sentinels.start()
    finally:
        sentinels.stop()
