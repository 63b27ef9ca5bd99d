"""Commands about a whole server, on each primary of a cluster."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from perdure.queues import Gateway
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

_PRIMARIES = 3
_KEYS = [
    next(key for key in map(str, count()) if key_slot(key.encode()) * _PRIMARIES // REDIS_CLUSTER_HASH_SLOTS == share)
    for share in range(_PRIMARIES)
]
"""A key of each primary of the tests' shared cluster."""


def whereabouts(gateway: Gateway) -> list[str | None]:
    """Return values for `node_of` with which a command reaches each primary."""
    return [*_KEYS] if gateway.address.clustered else [None]


async def on_every_node(gateway: Gateway, *command: str | int | bytes) -> list[Any]:
    """Return the reply of each primary, or of the single server."""
    return await asyncio.gather(*(gateway.command(*command, node_of=key) for key in whereabouts(gateway)))
