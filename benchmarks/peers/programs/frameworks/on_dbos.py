"""DBOS, in the calling process: its workflows need no worker."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from dbos import DBOS

from ..setup import DATABASE_URL

BLOCKING = "BENCH_COROUTINES" not in os.environ

_POOL: dict[str, Any] = {"sys_db_pool_size": int(os.environ["BENCH_POOL"])} if "BENCH_POOL" in os.environ else {}


@DBOS.step()
def add(number: int) -> int:
    return number + 1


@DBOS.workflow()
def walk(number: int) -> int:
    for _ in range(10):
        number = add(number)
    return number


@DBOS.step()
async def add_async(number: int) -> int:
    return number + 1


@DBOS.workflow()
async def walk_async(number: int) -> int:
    for _ in range(10):
        number = await add_async(number)
    return number


def launch() -> None:
    DBOS(config={"name": "bench", "system_database_url": DATABASE_URL, "log_level": "WARNING", **_POOL})
    DBOS.launch()


@contextmanager
def threads() -> Iterator[Callable[[int], int]]:
    """Provide a workflow of ten steps as a plain function."""
    launch()
    try:
        yield walk
    finally:
        DBOS.destroy()


@asynccontextmanager
async def coroutines() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Provide the same workflow as a coroutine."""
    launch()
    try:
        yield walk_async
    finally:
        DBOS.destroy()


walker = threads if BLOCKING else coroutines
