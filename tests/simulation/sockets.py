"""Blocking connections of the simulated world, for the threads of a worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import redis.connection
import redis.utils

from .network import LATENCY, Network
from .threads import block

__all__ = ["sync_connection"]

redis.utils.get_lib_version = cache(redis.utils.get_lib_version)  # each connection reads the metadata of the package


class _Socket:
    """The part of a blocking socket that redis-py uses."""

    def __init__(self, network: Network, name: str, timeout: float | None) -> None:
        self._loop = network.loop
        self._timeout = timeout
        self._buffer = bytearray()
        self._lost: Exception | None = None
        self._wake: Callable[..., None] | None = None
        self._connection = network.open(name, self._receive, self._break)

    def _receive(self, data: bytes) -> None:
        self._buffer += data
        self._resume()

    def _break(self, error: Exception | None) -> None:
        self._lost = error
        self._resume()

    def _resume(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def sendall(self, data: bytes) -> None:
        if self._lost is not None:
            raise self._lost
        self._connection.write(data)

    def recv(self, count: int, flags: int = 0) -> bytes:
        self._wait()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def recv_into(self, buffer: Any, count: int = 0, flags: int = 0) -> int:
        found = self.recv(count or len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def readable(self) -> bool:
        return bool(self._buffer) or self._lost is not None

    def _wait(self) -> None:
        if self._buffer:
            return
        if self._lost is not None:
            raise self._lost
        if self._timeout == 0:
            raise BlockingIOError(11, "resource temporarily unavailable")
        block(self._loop, self._arrange)
        if self._lost is not None:
            raise self._lost
        if not self._buffer:
            raise TimeoutError("timed out")

    def _arrange(self, resume: Callable[..., None]) -> None:
        self._wake = resume
        if self._timeout is not None:
            self._loop.call_later(self._timeout, resume)

    def shutdown(self, how: int) -> None:
        self._connection.close()

    def close(self) -> None:
        self._connection.close()


def sync_connection(network: Network) -> type[redis.connection.Connection]:
    """Return the class of the connections of synchronous clients."""

    class SyncConnection(redis.connection.Connection):
        """Connection over the simulated network."""

        def _connect(self) -> Any:
            loop = network.loop
            block(loop, lambda resume: loop.call_later(sum(LATENCY), resume))
            return _Socket(network, self.host, self.socket_connect_timeout)

        def can_read(self, timeout: float | None = 0) -> bool:
            """Return whether there is something to read at once; redis-py asks with select, which needs a file."""
            socket: Any = self._sock
            return socket is not None and bool(socket.readable())

    return SyncConnection
