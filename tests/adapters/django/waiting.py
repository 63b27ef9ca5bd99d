"""Waiting for what other processes do."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import anyio


async def until(holds: Callable[[], object], what: str, timeout: float = 40.0) -> None:
    """Wait until a condition holds. Raises `TimeoutError`. what: the condition, for the error."""
    end = monotonic() + timeout
    while not holds():
        if monotonic() > end:
            raise TimeoutError(f"waited {timeout:g} s until {what}")
        await anyio.sleep(0.02)
