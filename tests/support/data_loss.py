"""Servers that lose their last seconds: an append-only file that is cut, and a replica that lags behind."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import redis

from tests.support.append_only import EVERYSEC, AppendOnlyHistory
from tests.support.servers import RedisServer, answers

_LINKED_WITHIN: Final = 60.0
"""Seconds in which a replica connects. The bound only ends a failing test."""


class CutServer:
    """A server with an append-only file, whose power is cut: what it wrote last is lost."""

    def __init__(self, program: Path) -> None:
        self.server = RedisServer(program, EVERYSEC).start()
        self._history = AppendOnlyHistory(self.server)

    @property
    def url(self) -> str:
        return self.server.url

    def position(self) -> int:
        """Return how much the server has written."""
        return self._history.position()

    def keeps(self, position: int, seconds: float) -> bool:
        """Return whether a loss of the last seconds would keep what was written up to a position."""
        return self._history.position(seconds) >= position

    def lose(self, seconds: float) -> None:
        """Kill the server, and start it again without what it wrote during the last seconds."""
        self._history.lose_tail(seconds)
        self.server.start()

    def close(self) -> None:
        self._history.close()
        self.server.stop()


class LaggingPair:
    """A primary and a replica that has everything some seconds late; clients know the address of the primary only."""

    def __init__(self, program: Path, lag: float, ports: Sequence[int]) -> None:
        """ports: of the primary, and of the line between the two."""
        self._lag = lag
        self._primary_port, line_port = ports
        self._primary = RedisServer(program, ("--save", "", "--port", str(self._primary_port)))
        self._primary.start()
        self._line = socket.create_server(("127.0.0.1", line_port))
        self._broken = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        self._replica = RedisServer(program, ("--save", "", "--replicaof", "127.0.0.1", str(line_port)))
        self._replica.start()
        self._wait_for_link()

    def _wait_for_link(self) -> None:
        """Wait until the replica has its first copy: before that, the primary does not count what it writes."""
        until = time.monotonic() + _LINKED_WITHIN
        while self._info(self._replica).get("master_link_status") != "up":
            assert time.monotonic() < until, "the replica did not connect"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return self._primary.url

    def position(self) -> int:
        """Return how much the primary has written."""
        return self._offset(self._primary, "master_repl_offset")

    def keeps(self, position: int, seconds: float) -> bool:
        """Return whether the replica has what was written up to a position."""
        assert seconds == self._lag
        return self._offset(self._replica, "slave_repl_offset") >= position

    def _offset(self, server: RedisServer, name: str) -> int:
        return int(self._info(server).get(name, -1))

    @staticmethod
    def _info(server: RedisServer) -> dict[str, Any]:
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            return dict(client.info("replication"))

    def lose(self, seconds: float) -> None:
        """Kill the primary, and put the replica in its place."""
        assert seconds == self._lag
        self._broken.set()
        self._primary.kill()
        self._line.close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._replica.socket))
            client.sendall(b"REPLICAOF NO ONE\r\n")
            assert client.recv(16).startswith(b"+OK")
        self._replica.socket.rename(self._primary.socket)
        assert answers(self._primary.socket)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                replica, _ = self._line.accept()
                try:
                    primary = socket.create_connection(("127.0.0.1", self._primary_port))
                except OSError:
                    replica.close()
                    raise
                threading.Thread(target=self._carry, args=(replica, primary, 0.0), daemon=True).start()
                threading.Thread(target=self._carry, args=(primary, replica, self._lag), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, delay: float) -> None:
        """Carry bytes one way, each after the delay; what is under way when the line breaks is lost."""
        held: deque[tuple[float, bytes]] = deque()
        with suppress(OSError), source, target:
            source.settimeout(0.01)
            while not self._broken.is_set():
                with suppress(TimeoutError):
                    data = source.recv(65536)
                    if not data:
                        return
                    held.append((time.monotonic() + delay, data))
                while held and held[0][0] <= time.monotonic():
                    target.sendall(held.popleft()[1])

    def close(self) -> None:
        self._broken.set()
        self._line.close()
        self._replica.stop()
        self._primary.stop()
