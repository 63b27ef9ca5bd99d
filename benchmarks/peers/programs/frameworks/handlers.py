"""Handlers for projects that run coroutines; each project registers them in its own way."""

from __future__ import annotations

import asyncio

from ..setup import NAP, TIMES

__all__ = ["echo", "hang", "nap", "noop"]

_FOR_EVER = 3600


async def noop(number: int) -> int:
    """Do nothing."""
    TIMES.begin(number)
    TIMES.end(number)
    return number + 1


async def echo(number: int, text: str) -> str:
    """Return the text."""
    TIMES.begin(number)
    TIMES.end(number)
    return text


async def nap(number: int) -> int:
    """Wait, like a request to another server."""
    TIMES.begin(number)
    await asyncio.sleep(NAP)
    TIMES.end(number)
    return number + 1


async def hang(number: int) -> int:
    """Block in the first run, so that its worker can be killed; return at once in the second."""
    if TIMES.began(number):
        TIMES.end(number)
        return number + 1
    TIMES.begin(number)
    await asyncio.sleep(_FOR_EVER)
    return number + 1
