"""Servers of a cluster or replication group: processes on ports of loopback that can be killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers.redis import RedisServer

BOUND: Final = 60.0
"""Seconds that a test waits for servers. The bound only ends a failing test."""

BUS: Final = 10_000
"""Offset of the cluster bus from a node's port; it is fixed before Redis 7.0."""


class Node:
    """One server on a port of loopback. Its role is decided by the group."""

    def __init__(self, program: Path, port: int, options: Sequence[str], client_options: dict[str, Any]) -> None:
        """client_options: options of clients besides host and port (password, certificates)."""
        self.port = port
        self.server = RedisServer(program, tuple(options))
        self._client_options = client_options
        self._client: redis.Redis | None = None

    def __repr__(self) -> str:
        return f"node {self.port}"

    @property
    def alive(self) -> bool:
        return self.server.process is not None and self.server.process.poll() is None

    @property
    def password(self) -> str:
        return str(self._client_options.get("password") or "")

    @cached_property
    def id(self) -> str:
        """Id of the node in its cluster."""
        return str(self.command("CLUSTER", "MYID").decode())

    def start(self) -> None:
        self.server.start(self.password)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.alive:
            self.thaw()  # a stopped process would not handle SIGTERM
        self.server.stop()

    def freeze(self) -> None:
        """Send SIGSTOP: connections stay open, and no command is run."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)

    def command(self, *command: str | int | bytes) -> Any:
        """Run one command on this node; redirections are raised as errors, not followed."""
        if self._client is None:
            self._client = redis.Redis(
                host="127.0.0.1",
                port=self.port,
                socket_timeout=BOUND,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                **self._client_options,
            )
            self._client.response_callbacks.clear()
        return self._client.execute_command(*command)

    def info(self, section: str) -> dict[str, str]:
        """Return the reply of INFO."""
        lines = self.command("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition is true; errors of unreachable servers are ignored until the bound."""
    deadline = time.monotonic() + BOUND
    problem: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (redis.ConnectionError, redis.TimeoutError, AssertionError, StopIteration) as error:
            problem = error
        time.sleep(0.02)
    raise RuntimeError(f"waited {BOUND:g} s in vain for {what}: {problem}")


def free_ports(count: int, *, bus: bool = False) -> list[int]:
    """Return free ports of loopback, below those that the system gives to outgoing connections.

    With `bus`, the port that is `BUS` above is free too.
    """
    found: list[int] = []
    # each pytest-xdist process picks from its own range
    first = 11_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4 * 2750
    for port in random.sample(range(first, first + 2750), 2000):
        if len(found) == count:
            break
        if _is_free(port) and (not bus or _is_free(port + BUS)):
            found.append(port)
    assert len(found) == count, "no free ports"
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
