"""The handlers of the peers that run coroutines. Each peer registers these functions in its own way."""

from __future__ import annotations

import asyncio

from .setup import NAP, TAPE

__all__ = ["echo", "hang", "nap", "noop"]

_FOR_EVER = 3600


async def noop(number: int) -> int:
    """Nothing."""
    TAPE.begin(number)
    TAPE.end(number)
    return number + 1


async def echo(number: int, text: str) -> str:
    """The text, handed back."""
    TAPE.begin(number)
    TAPE.end(number)
    return text


async def nap(number: int) -> int:
    """Wait for something else, as a request to another server does."""
    TAPE.begin(number)
    await asyncio.sleep(NAP)
    TAPE.end(number)
    return number + 1


async def hang(number: int) -> int:
    """Does not end when it is run first, so that it is there to be killed; ends at once when it is run again."""
    if TAPE.began(number):
        TAPE.end(number)
        return number + 1
    TAPE.begin(number)
    await asyncio.sleep(_FOR_EVER)
    return number + 1
