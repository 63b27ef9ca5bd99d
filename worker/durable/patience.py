"""Waiting for Redis to come back: what a run has earned must not be lost to a restart of the server."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from ...queues import Unavailable
from ..log import logger

__all__ = ["until_available"]

T = TypeVar("T")

_LONGEST_WAIT = 5.0


async def until_available(act: Callable[[], Awaitable[T]], what: str, on_wait: Callable[[], None] = lambda: None) -> T:
    """Carry out `act`, again and again while Redis is away, until it succeeds, is refused, or is cancelled.

    what: names it in the log. on_wait: hears that it has to wait. Safe for acts that are repeatable and fenced: once
    another worker has the task, the fence refuses it.
    """
    delay = 0.1
    while True:
        try:
            return await act()
        except Unavailable as error:
            on_wait()
            logger.warning("{} waits for Redis: {}", what, error)
            await anyio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            delay = min(delay * 2, _LONGEST_WAIT)
