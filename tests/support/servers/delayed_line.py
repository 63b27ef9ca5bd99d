"""A line between a primary and its replica that delivers late, and loses what is under way when it is cut."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["DelayedLine"]

_POLL: Final = 0.01
"""Seconds between two looks at what is due."""


class DelayedLine:
    """Forwards connections on a port of loopback to a unix socket; replies are `delay` seconds late.

    After `cut`, what was received more than `delay` seconds before is still delivered, and nothing else.
    """

    def __init__(self, target: Path, delay: float = 0.0) -> None:
        """target: socket of the primary."""
        self.delay = delay
        self._target = target
        self._cut_at: float | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, name="delayed line", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Lose what is under way, close the connections, and accept no more. Idempotent."""
        if self._cut_at is None:
            self._cut_at = time.monotonic()
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not end `accept` in the other thread
            self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(os.fspath(self._target))
                except OSError:  # it does not listen yet, or has ended
                    client.close()
                    server.close()
                    continue
                threading.Thread(target=self._carry_requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._carry_replies, args=(server, client), daemon=True).start()

    def _carry_requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _carry_replies(self, server: socket.socket, client: socket.socket) -> None:
        """Carry bytes one way, each after the delay; close both ends."""
        held: deque[tuple[float, bytes]] = deque()
        ended = False
        with suppress(OSError), server, client:
            server.settimeout(_POLL)
            while self._cut_at is None and not (ended and not held):
                if ended:
                    time.sleep(_POLL)
                else:
                    with suppress(TimeoutError):
                        data = server.recv(65536)
                        ended = not data
                        held.append((time.monotonic(), data))
                self._deliver(held, client, time.monotonic() - self.delay)
            if self._cut_at is not None:
                self._deliver(held, client, self._cut_at - self.delay)

    @staticmethod
    def _deliver(held: deque[tuple[float, bytes]], client: socket.socket, until: float) -> None:
        while held and held[0][0] <= until:
            client.sendall(held.popleft()[1])
