"""Communication with the harness: one JSON document per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NoFigure", "report", "reporting_failure", "wait"]


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


def report(**found: object) -> None:
    """Send a line to the harness."""
    print(json.dumps(found), flush=True)


def wait() -> None:
    """Wait until the harness continues this program."""
    if not sys.stdin.readline():
        raise SystemExit("the harness has exited")
