"""Retentions of records: for how long a partition of a previous generation may still have a record.

An id is looked up in the partitions of the route only, so a generation leaves the route after its last record has
expired. Each task may have a result TTL of its own, and the ACL role of workers has no SCAN, so each script that gives
a record its retention registers that in the partition (retention.lua). retire_partition.lua knows from that when the
last record expires at the latest.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

_STEPS: Final = 4
"""Registered retentions per doubling: a partition has few, and each is at most 19 % above those that it covers."""


@lru_cache(1024)
def registered_retention(ttl: float) -> int:
    """Return the registered retention for a TTL: in milliseconds, rounded up to one of few values."""
    return math.ceil(2 ** (math.ceil(_STEPS * math.log2(max(1.0, ttl * 1000))) / _STEPS))
