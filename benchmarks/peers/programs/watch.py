"""Watching tasks run, on the tape, and reading their results back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from .setup import TAPE
from .told import Unfit

__all__ = ["Reader", "watch"]

_LOOK = 0.002
"""Seconds between two looks at the tape: rare enough to take nothing from what is measured."""

_LOOK_FOR_THE_FIRST = 0.02
_READABLE_WITHIN = 20.0
_SAMPLES = 10
_NEVER = float("inf")


@dataclass(frozen=True)
class Reader:
    """A client's two calls, of coroutines or plain: whether a task's result is there, and the result."""

    ready: Callable[[Any], Any]
    read: Callable[[Any], Any]

    async def wait(self, handle: Any) -> None:
        """Until the result is there."""
        deadline = time.monotonic() + _READABLE_WITHIN
        while not await _done(self.ready(handle)):
            if time.monotonic() > deadline:
                raise Unfit(f"a task ran and its result is not there after {_READABLE_WITHIN:g} s")
            await asyncio.sleep(_LOOK / 4)

    async def result(self, handle: Any) -> Any:
        """The result, waited for."""
        await self.wait(handle)
        return await _done(self.read(handle))


async def watch(
    handles: Sequence[Any], reader: Reader, expected: Callable[[int], object], limit: float, *, whole: bool
) -> dict[str, float]:
    """Until all have run and the last one's result is there, or `limit` seconds after the first began.

    whole: every handle is a task with a row of its own on the tape. Else the one handle is a parent, in the first row;
    its time is from its beginning to its end.

    Returns how many ran and in how many seconds. Raises Unfit for a result that is missing or not the task's.
    """
    count = len(handles)
    first = await _first(count)
    if await _all_ended(count, first + limit):
        last = max(range(count), key=TAPE.ended)
        await reader.wait(handles[last])
        over = time.monotonic() if whole else TAPE.ended(0)
        ran = list(range(count))
    else:
        over = first + limit
        ran = [number for number in range(count) if 0 < TAPE.ended(number) <= over]
        if not ran:
            raise Unfit(f"not ended within {limit:g} s")
    for number in ran[:: max(1, len(ran) // _SAMPLES)]:
        if (found := await reader.result(handles[number])) != expected(number):
            raise Unfit(f"task {number} has a result that is not its own: {str(found)[:80]}")
    return {"ran": len(ran), "seconds": over - first, "limited": len(ran) < count}


async def _first(count: int) -> float:
    """When the first handler began. For ever, if none does: the harness has a limit of its own."""
    while not any(TAPE.began(number) for number in range(count)):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_LOOK_FOR_THE_FIRST)
    # Others may have begun in the meantime, in any order.
    return min(TAPE.began(number) or _NEVER for number in range(count))


async def _all_ended(count: int, deadline: float) -> bool:
    number = 0
    while number < count:
        if TAPE.ended(number):
            number += 1
        elif time.monotonic() > deadline:
            return False
        else:
            await asyncio.sleep(_LOOK)
    return True


async def _done(answer: Any) -> Any:
    return await answer if isawaitable(answer) else answer
