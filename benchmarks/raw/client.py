"""The raw client: hiredis on one connection of redis-py, which only connects."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import hiredis
import redis

__all__ = ["RawClient"]

Command = tuple[str | bytes | int, ...]


class RawClient:
    """One connection without a read time-out. Commands and their replies are unchanged."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=None)
        connection = self._client.connection_pool.get_connection()
        self._socket: Any = connection._sock  # it has no public name; all else in redis-py costs time
        self._reader = hiredis.Reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.connection_pool.disconnect()
        self._client.close()

    def call(self, *command: str | bytes | int) -> Any:
        """Execute one command. Raises `hiredis.ReplyError`."""
        return self.pipeline([command])[0]

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Execute commands in one round trip. Raises `hiredis.ReplyError` where one was refused."""
        self._socket.sendall(b"".join([hiredis.pack_command(command) for command in commands]))  # type: ignore[arg-type]  # its stub says: a tuple of one
        replies: list[Any] = []
        while len(replies) < len(commands):
            received = self._socket.recv(65_536)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._reader.feed(received)
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                replies.append(reply)
        return replies
