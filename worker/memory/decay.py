"""How much a memory counts now: less as it is left alone, more the more often it was used."""

from __future__ import annotations

import math
from typing import Final

from .memory import Memory

__all__ = ["strength"]

_DECAY: Final = 0.01
"""Per day since it was last used: half the strength is left after 69.3 days."""

_GAIN: Final = 0.1
_DAY: Final = 86_400.0


def strength(memory: Memory, now: float) -> float:
    """importance x (1 + 0.1 ln(1 + accesses)) x exp(-0.01 x days since it was used). now: seconds since 1970.

    A clock that went back makes nothing stronger.
    """
    days = max(0.0, now - memory.accessed) / _DAY
    return memory.importance * (1 + _GAIN * math.log1p(memory.accesses)) * math.exp(-_DECAY * days)
