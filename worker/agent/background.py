"""Having something done while something else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["in_background"]


@asynccontextmanager
async def in_background(act: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have something done while the block runs; what the block raises comes out as it is."""
    doing = asyncio.create_task(act)
    try:
        yield
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
