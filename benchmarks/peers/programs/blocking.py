"""The handlers of the peers that run plain functions in threads or processes."""

from __future__ import annotations

import time

from .setup import NAP, TAPE

__all__ = ["echo", "hang", "nap", "noop"]

_FOR_EVER = 3600


def noop(number: int) -> int:
    """Nothing."""
    TAPE.begin(number)
    TAPE.end(number)
    return number + 1


def echo(number: int, text: str) -> str:
    """The text, handed back."""
    TAPE.begin(number)
    TAPE.end(number)
    return text


def nap(number: int) -> int:
    """Wait for something else, as a request to another server does."""
    TAPE.begin(number)
    time.sleep(NAP)
    TAPE.end(number)
    return number + 1


def hang(number: int) -> int:
    """Does not end when it is run first, so that it is there to be killed; ends at once when it is run again."""
    if TAPE.began(number):
        TAPE.end(number)
        return number + 1
    TAPE.begin(number)
    time.sleep(_FOR_EVER)
    return number + 1
