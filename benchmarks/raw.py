"""The raw client of `perdure bench`, on the URL of a server."""

from __future__ import annotations

import redis
from perdure.worker.cli.bench import raw

__all__ = ["RawClient"]


class RawClient(raw.RawClient):
    """One connection; a reply is waited for as long as it takes."""

    def __init__(self, url: str) -> None:
        super().__init__(redis.Redis.from_url(url, protocol=2, socket_timeout=None))
