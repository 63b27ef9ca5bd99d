"""How a program tells the harness what it found, and waits for it: one JSON document per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Unfit", "tell", "telling", "wait"]


class Unfit(Exception):
    """What was measured gives no figure; says why, in words for the table."""


@contextmanager
def telling() -> Iterator[None]:
    """Tells the harness why there is no figure, when `Unfit` is raised within."""
    try:
        yield
    except* Unfit as found:
        # Clients with task groups wrap it, in as many groups as they have.
        why: BaseException = found
        while isinstance(why, BaseExceptionGroup):
            why = why.exceptions[0]
        tell(failed=str(why))


def tell(**found: object) -> None:
    """A line to the harness."""
    print(json.dumps(found), flush=True)


def wait() -> None:
    """Until the harness says to go on."""
    if not sys.stdin.readline():
        raise SystemExit("the harness has gone")
