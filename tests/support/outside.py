"""What a person or another program does while a handler of this process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


async def from_outside(call: Coroutine[Any, Any, T]) -> T:
    """Run a call outside of the task whose handler awaits it: a task sends and answers under its own id only."""
    return await asyncio.create_task(call, context=Context())
