"""Retentions of records: for how long a partition of a previous generation may still have a record.

An id is looked up in the partitions of the route only, so a generation leaves the route after its last record has
expired. Each task may have a result TTL of its own, and workers may not SCAN (docs/how-to/security.md), so each process
registers a retention in the partition before it keeps records for that long: at most once in `_INTERVAL` seconds, apart
from the path of a task. retire_partition.lua knows from that when the last record expires at the latest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from ..keys import Partition
from ..transport import Gateway, queue_script

__all__ = ["RetentionRegister", "register_retention", "registered_retention"]

_REGISTER = queue_script("register_retention")

_INTERVAL: Final = 60.0
"""Seconds for which this process does not register a retention again. Redis counts twice that: between the registration
and the last use lie a round trip, and perhaps a step of its clock.
"""

_MOST: Final = 10_000
"""Registered retentions that a process remembers."""

_STEPS: Final = 4
"""Registered retentions per doubling: a partition has few, and each is at most 19 % above those that it covers."""


async def register_retention(gateway: Gateway, partition: Partition, ttl: float) -> None:
    """Register that records of a partition are kept for `ttl` seconds, from now and for the next minute."""
    await gateway.run(_REGISTER, [partition.retentions], [registered_retention(ttl), round(2 * _INTERVAL * 1000)])


class RetentionRegister:
    """Registers the retentions that this process uses, each once in a while."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._due: dict[tuple[str, float], float] = {}

    def is_due(self, partition: Partition, ttl: float) -> bool:
        """Return whether `register` must be called before a record gets this TTL. Each settlement asks."""
        return self._due.get((partition.retentions, ttl), -math.inf) <= self._clock()

    async def register(self, partition: Partition, ttl: float) -> None:
        """Register a retention, in seconds, for the next minute."""
        now = self._clock()
        await register_retention(self._gateway, partition, ttl)
        if len(self._due) > _MOST:  # producers choose TTLs
            self._due.clear()
        self._due[partition.retentions, ttl] = now + _INTERVAL


def registered_retention(ttl: float) -> int:
    """Return the registered retention for a TTL: in milliseconds, rounded up to one of few values."""
    return math.ceil(2 ** (math.ceil(_STEPS * math.log2(max(1.0, ttl * 1000))) / _STEPS))
