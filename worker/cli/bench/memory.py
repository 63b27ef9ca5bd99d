"""What tasks take of the server's memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ....queues import Refused
from .ground import Ground

__all__ = ["mean_memory", "memory"]


async def memory(ground: Ground, key: str) -> float | None:
    """Bytes that a key takes, its name included; None where the server does not tell."""
    try:
        return float(await ground.gateway.command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)
    except Refused:
        return None


async def mean_memory(ground: Ground, keys: Sequence[str]) -> float | None:
    found = [await memory(ground, key) for key in keys]
    return None if None in found else statistics.fmean(one for one in found if one is not None)
