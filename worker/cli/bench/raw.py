"""The raw client: hiredis on one connection, and nothing in between."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import hiredis
import redis

__all__ = ["RawClient"]

Command = tuple[str | bytes | int, ...]

_CHUNK = 65_536


class RawClient:
    """Commands and their replies as they are. redis-py only connects: it knows URLs, TLS and passwords."""

    def __init__(self, client: redis.Redis) -> None:
        """client: is this one's from now on; it gives an address and credentials, and protocol 2 is spoken."""
        client.connection_pool.connection_kwargs["protocol"] = 2
        self._client = client
        self._connection = client.connection_pool.get_connection()
        self._socket: Any = self._connection._sock  # it has no public name; all else in redis-py costs time
        self._reader = hiredis.Reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.disconnect()
        self._client.close()

    def call(self, *command: str | bytes | int) -> Any:
        """Carry out one command. Raises `hiredis.ReplyError`."""
        return self.pipeline([command])[0]

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Carry out commands in one round trip. Raises `hiredis.ReplyError` where one was refused."""
        self._socket.sendall(b"".join([_pack(command) for command in commands]))
        replies: list[Any] = []
        while len(replies) < len(commands):
            received = self._socket.recv(_CHUNK)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._reader.feed(received)
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                replies.append(reply)
        return replies


def _pack(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub says: a tuple of one
    return packed
