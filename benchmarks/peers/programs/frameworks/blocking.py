"""Handlers for projects that run plain functions in threads or processes."""

from __future__ import annotations

import time

from ..setup import NAP, TIMES

__all__ = ["echo", "hang", "nap", "noop"]

_FOR_EVER = 3600


def noop(number: int) -> int:
    """Do nothing."""
    TIMES.begin(number)
    TIMES.end(number)
    return number + 1


def echo(number: int, text: str) -> str:
    """Return the text."""
    TIMES.begin(number)
    TIMES.end(number)
    return text


def nap(number: int) -> int:
    """Wait, like a request to another server."""
    TIMES.begin(number)
    time.sleep(NAP)
    TIMES.end(number)
    return number + 1


def hang(number: int) -> int:
    """Block in the first run, so that its worker can be killed; return at once in the second."""
    if TIMES.began(number):
        TIMES.end(number)
        return number + 1
    TIMES.begin(number)
    time.sleep(_FOR_EVER)
    return number + 1
