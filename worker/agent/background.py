"""A coroutine that runs for the duration of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["in_background"]


@asynccontextmanager
async def in_background(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine during the block and cancel it at the end. Its own exception is dropped."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
