"""Ticker: writes the time into Redis again and again, so that a loss of data can be measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

__all__ = ["Ticker"]

_KEY: Final = "ticker"
"""Key of the time, outside the namespace of the run."""

_INTERVAL: Final = 0.05


class Ticker:
    """Stores the time of the journal before each write, so what Redis executed up to a stored time was stored before.

    A time that survives a loss is a bound: lines of the journal that are not later are of writes that survived, too.
    """

    def __init__(self, url: str) -> None:
        """url: address of the server, without a proxy."""
        self._url = url
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Write until cancelled."""
        once = Retry(NoBackoff(), 0)  # the next time follows at once
        async with redis.asyncio.Redis.from_url(self._url, socket_timeout=1.0, retry=once) as client:
            while True:
                async with self._writing:
                    with suppress(redis.RedisError, OSError):
                        await client.set(_KEY, time.clock_gettime_ns(time.CLOCK_MONOTONIC))
                await asyncio.sleep(_INTERVAL)

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Write nothing during the block, so that `last` returns what survived."""
        async with self._writing:
            yield

    async def last(self) -> int:
        """Return the time that is stored, 0 without one."""
        async with redis.asyncio.Redis.from_url(self._url, socket_timeout=5.0) as client:
            return int(await client.get(_KEY) or 0)
