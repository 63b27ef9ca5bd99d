"""Handlers for projects that run coroutines; each project registers them in its own way."""

from __future__ import annotations

import asyncio

from .setup import NAP, TAPE

__all__ = ["echo", "hang", "nap", "noop"]

_FOR_EVER = 3600


async def noop(number: int) -> int:
    """Do nothing."""
    TAPE.begin(number)
    TAPE.end(number)
    return number + 1


async def echo(number: int, text: str) -> str:
    """Return the text."""
    TAPE.begin(number)
    TAPE.end(number)
    return text


async def nap(number: int) -> int:
    """Wait, like a request to another server."""
    TAPE.begin(number)
    await asyncio.sleep(NAP)
    TAPE.end(number)
    return number + 1


async def hang(number: int) -> int:
    """Block in the first run, so that its worker can be killed; return at once in the second."""
    if TAPE.began(number):
        TAPE.end(number)
        return number + 1
    TAPE.begin(number)
    await asyncio.sleep(_FOR_EVER)
    return number + 1
