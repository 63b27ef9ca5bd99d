"""A coroutine that runs for the duration of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

_AGAIN: Final = 0.1
"""Seconds after which a coroutine that has not ended is cancelled again."""


@asynccontextmanager
async def in_background(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine during the block and cancel it at the end. Its own exception is dropped."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        while not task.done():
            task.cancel()  # more than once: up to Python 3.11, `asyncio.wait_for` may swallow a cancellation
            await asyncio.wait([task], timeout=_AGAIN)
        if not task.cancelled():
            task.exception()
