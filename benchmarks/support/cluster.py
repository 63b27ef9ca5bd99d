"""A Redis Cluster of a benchmark: primaries without replicas, each a process on a port of loopback."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import hiredis
import redis
from redis.crc import key_slot

from ..raw.client import RawClient
from .deployment import Deployment
from .server import NoServer, server_program

__all__ = ["Cluster", "own_cluster"]

SLOTS: Final = 16_384

_BUS: Final = 10_000
"""Offset of the port of the cluster bus."""

_STARTED_WITHIN: Final = 30.0
_STOPPED_WITHIN: Final = 20.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A deployment on several nodes. nodes: the same namespace on each of them, for `INFO`."""

    deployment: Deployment
    nodes: Sequence[Deployment]

    def node_of(self, key: str) -> int:
        """Return the number of the node that has the key."""
        slot: int = key_slot(key.encode())
        return slot * len(self.nodes) // SLOTS


@contextmanager
def own_cluster(primaries: int) -> Iterator[Cluster]:
    """Start a cluster without persistence; stop and remove it afterwards. Raises `NoServer`."""
    ports = _free_ports(primaries)
    with ExitStack() as stack:
        for port in ports:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="perdure-bench-")))
            server = subprocess.Popen(
                [
                    *(server_program(), "--bind", "127.0.0.1", "--port", str(port), "--dir", folder),
                    *("--cluster-enabled", "yes", "--save", "", "--appendonly", "no", "--logfile", folder / "log"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            stack.callback(_stop, server)
        nodes = [Deployment(f"redis://127.0.0.1:{port}", "bench") for port in ports]
        deadline = time.monotonic() + _STARTED_WITHIN
        for number, node in enumerate(nodes):
            first, after = (-(-SLOTS * one // primaries) for one in (number, number + 1))
            _wait(partial(_answers, node), deadline)
            _answer(node, "CLUSTER", "ADDSLOTS", *range(first, after))
            _answer(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            _answer(node, "CLUSTER", "MEET", "127.0.0.1", ports[0], ports[0] + _BUS)
        for node in nodes:
            _wait(partial(_complete, node, primaries), deadline)
        url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports)}"
        yield Cluster(Deployment(url, "bench"), nodes)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(_STOPPED_WITHIN)


def _answer(node: Deployment, *command: str | int) -> bytes:
    with RawClient(node.url) as client:
        answer: bytes = client.call(*command)
        return answer


def _answers(node: Deployment) -> bool:
    return _answer(node, "PING") == b"PONG"


def _complete(node: Deployment, primaries: int) -> bool:
    info = _answer(node, "CLUSTER", "INFO").decode()
    return "cluster_state:ok" in info and f"cluster_size:{primaries}\r" in info


def _wait(ready: Callable[[], bool], deadline: float) -> None:
    while True:
        try:
            if ready():
                return
        except (redis.ConnectionError, hiredis.ReplyError):
            pass
        if time.monotonic() > deadline:
            raise NoServer(f"the cluster did not start within {_STARTED_WITHIN:g} s")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Return free ports whose port for the cluster bus is free, too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if port + _BUS > 65_535 or port in found:
                continue
            try:
                bus.bind(("127.0.0.1", port + _BUS))
            except OSError:
                continue
            found.append(port)
    return found
