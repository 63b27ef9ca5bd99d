"""Watch tasks in the time file, and read their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from .harness import NoFigure
from .setup import TIMES

__all__ = ["Reader", "watch"]

_LOOK = 0.002
"""Seconds between two readings of the time file; rare enough not to affect the figures."""

_LOOK_FOR_THE_FIRST = 0.02
_READABLE_WITHIN = 20.0
_SAMPLES = 10
_NEVER = float("inf")


@dataclass(frozen=True)
class Reader:
    """A client's calls, async or plain: whether a result is ready, and the result. kept: whether there are results."""

    ready: Callable[[Any], Any]
    read: Callable[[Any], Any]
    kept: bool

    async def wait(self, handle: Any) -> None:
        """Wait until the result is ready."""
        deadline = time.monotonic() + _READABLE_WITHIN
        while not await _done(self.ready(handle)):
            if time.monotonic() > deadline:
                raise NoFigure(f"a task ran, but its result is not readable after {_READABLE_WITHIN:g} s")
            await asyncio.sleep(_LOOK / 4)

    async def result(self, handle: Any) -> Any:
        """Wait for the result and return it."""
        await self.wait(handle)
        return await _done(self.read(handle))


async def watch(
    handles: Sequence[Any], reader: Reader, expected: Callable[[int], object], limit: float, *, whole: bool
) -> dict[str, float]:
    """Wait until all tasks have run and the last result is ready, or until `limit` seconds after the first start.

    whole: every handle is a task with its own row in the time file. Otherwise the only handle is a parent in the first
    row, whose time is from its start to its end.

    Returns the number of finished tasks and the seconds. Raises `NoFigure` for a missing or wrong result.
    """
    count = len(handles)
    first = await _first(count)
    if await _all_ended(count, first + limit):
        last = max(range(count), key=TIMES.ended)
        await reader.wait(handles[last])
        over = time.monotonic() if whole else TIMES.ended(0)
        ran = list(range(count))
    else:
        over = first + limit
        ran = [number for number in range(count) if 0 < TIMES.ended(number) <= over]
        if not ran:
            raise NoFigure(f"not ended within {limit:g} s")
    for number in ran[:: max(1, len(ran) // _SAMPLES)]:
        if not reader.kept:
            await reader.wait(handles[number])
        elif (found := await reader.result(handles[number])) != expected(number):
            raise NoFigure(f"task {number} has the result of another task: {str(found)[:80]}")
    return {"ran": len(ran), "seconds": over - first, "limited": len(ran) < count}


async def _first(count: int) -> float:
    """Return the first start of a handler. The harness limits this wait."""
    while not any(TIMES.began(number) for number in range(count)):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_LOOK_FOR_THE_FIRST)
    # Others may have started meanwhile, in any order.
    return min(TIMES.began(number) or _NEVER for number in range(count))


async def _all_ended(count: int, deadline: float) -> bool:
    number = 0
    while number < count:
        if TIMES.ended(number):
            number += 1
        elif time.monotonic() > deadline:
            return False
        else:
            await asyncio.sleep(_LOOK)
    return True


async def _done(answer: Any) -> Any:
    return await answer if isawaitable(answer) else answer
