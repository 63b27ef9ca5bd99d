"""DBOS, in the calling process: its workflows need no worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dbos import DBOS

from ..setup import DATABASE_URL

BLOCKING = True


@DBOS.step()
def add(number: int) -> int:
    return number + 1


@DBOS.workflow()
def walk(number: int) -> int:
    for _ in range(10):
        number = add(number)
    return number


@contextmanager
def walker() -> Iterator[Callable[[int], int]]:
    """Provide a workflow of ten steps."""
    DBOS(config={"name": "bench", "system_database_url": DATABASE_URL, "log_level": "WARNING"})
    DBOS.launch()
    try:
        yield walk
    finally:
        DBOS.destroy()
