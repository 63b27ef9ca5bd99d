"""Search for the few items of many that make a check fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

__all__ = ["guilty"]

T = TypeVar("T")


async def guilty(items: Sequence[T], fails: Callable[[Sequence[T]], Awaitable[bool]]) -> Sequence[T]:
    """Return few of the items that fail together: a single one, unless it takes several."""
    step = len(items) // 2
    while step:
        start = 0
        while start < len(items):
            part, rest = items[start : start + step], [*items[:start], *items[start + step :]]
            if len(part) < len(items) and await fails(part):
                items, start, step = part, 0, max(1, len(part) // 2)
            elif rest and len(rest) < len(items) and step < 2 and await fails(rest):
                items = rest
            else:
                start += step
        step //= 2
    return items
