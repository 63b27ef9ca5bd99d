"""The raw client, connected by URL."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import redis
from perdure.worker.cli.bench import raw

__all__ = ["RawClient"]


class RawClient(raw.RawClient):
    """One connection without a read time-out."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=None)
        super().__init__(self._client.connection_pool.get_connection())

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
