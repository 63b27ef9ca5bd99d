"""Servers that lose their last seconds: an append-only file that is cut, and a replica that lags behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import redis

from tests.support.servers.append_only import EVERYSEC, AppendOnlyHistory
from tests.support.servers.delayed_line import DelayedLine
from tests.support.servers.redis import RedisServer, answers

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

    def __init__(self, program: Path, lag: float) -> None:
        self._lag = lag
        self._primary = RedisServer(program, ("--save", "", "--repl-diskless-sync-delay", "0"))
        self._primary.start()
        self._line = DelayedLine(self._primary.socket)
        self._replica = RedisServer(program, ("--save", "", "--replicaof", "127.0.0.1", str(self._line.port)))
        self._replica.start()
        wait_for_copy(self._replica)
        self._line.delay = lag

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
        return int(server_info(server).get(name, -1))

    def lose(self, seconds: float) -> None:
        """Kill the primary, and put the replica in its place."""
        assert seconds == self._lag
        self._line.cut()
        self._primary.kill()
        promote(self._replica)
        self._replica.socket.rename(self._primary.socket)
        assert answers(self._primary.socket)

    def close(self) -> None:
        self._line.cut()
        self._replica.stop()
        self._primary.stop()


def wait_for_copy(replica: RedisServer) -> None:
    """Wait until a replica has its first copy, on its disk as well if it has an append-only file.

    Before that, the primary does not count what it writes.
    """
    _wait_for(
        lambda info: info["master_link_status"] == "up" and not info["aof_rewrite_in_progress"],
        replica,
        "the replica did not connect",
    )


def promote(replica: RedisServer) -> None:
    """Make a replica whose line was cut a primary, after it has read what had been delivered."""
    _wait_for(lambda info: info["master_link_status"] == "down", replica, "the replica did not notice the cut")
    with redis.Redis(unix_socket_path=str(replica.socket)) as client:
        client.replicaof("NO", "ONE")


def server_info(server: RedisServer) -> dict[str, Any]:
    """Return the reply of INFO."""
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        return dict(client.info())


def _wait_for(condition: Callable[[dict[str, Any]], bool], replica: RedisServer, problem: str) -> None:
    until = time.monotonic() + _LINKED_WITHIN
    while not condition(server_info(replica)):
        assert time.monotonic() < until, problem
        time.sleep(0.02)
