"""Waiting for as long as Redis is away, for those who have nothing better to do."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from ..errors import Unavailable

__all__ = ["retry_while_unavailable"]

T = TypeVar("T")

_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 2.0
"""Seconds before it is tried again, for the first time and after many."""


async def retry_while_unavailable(act: Callable[[], Awaitable[T]]) -> T:
    """What comes of a repeatable act, carried out again and again while Redis is away; bounded by who calls."""
    delay = _FIRST_DELAY
    while True:
        try:
            return await act()
        except Unavailable:
            await anyio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            delay = min(delay * 2, _LONGEST_DELAY)
