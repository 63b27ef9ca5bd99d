"""Communication with the harness: one JSON document per line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NoFigure", "report", "reporting_failure", "run", "wait"]


class NoFigure(Exception):
    """A measurement gives no figure; the text is the reason shown in the table."""


@contextmanager
def reporting_failure() -> Iterator[None]:
    """Report the reason to the harness if the block raises `NoFigure`."""
    try:
        yield
    except* NoFigure as found:
        # Task groups of clients may wrap it several times.
        why: BaseException = found
        while isinstance(why, BaseExceptionGroup):
            why = why.exceptions[0]
        report(failed=str(why))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a client: on uvloop, as its environment has it unless the client blocks."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def report(**found: object) -> None:
    """Send a line to the harness."""
    print(json.dumps(found), flush=True)


def wait() -> None:
    """Wait until the harness continues this program."""
    if not sys.stdin.readline():
        raise SystemExit("the harness has exited")
