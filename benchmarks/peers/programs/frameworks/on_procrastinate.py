"""procrastinate: `procrastinate -a programs.frameworks.on_procrastinate.app worker`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Status

from ..setup import DATABASE_URL
from . import handlers

BLOCKING = False
BULK = True
RESULTS = False

_POOL = {"max_size": int(os.environ["BENCH_POOL"])} if "BENCH_POOL" in os.environ else {}

app = App(connector=PsycopgConnector(conninfo=DATABASE_URL, **_POOL))

noop = app.task(name="noop")(handlers.noop)
echo = app.task(name="echo")(handlers.echo)
nap = app.task(name="nap")(handlers.nap)
hang = app.task(name="hang")(handlers.hang)

_TASKS = {"noop": noop, "echo": echo, "nap": nap, "hang": hang}


def named(arguments: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("number", "text"), arguments, strict=False))


class Client:
    async def enqueue(self, task: str, *arguments: Any) -> Any:
        return await _TASKS[task].defer_async(**named(arguments))

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        return await _TASKS[task].batch_defer_async(*(named(its) for its in arguments))

    async def ready(self, handle: Any) -> bool:
        return await app.job_manager.get_job_status_async(handle) is Status.SUCCEEDED

    async def read(self, handle: Any) -> None:
        """There is no result."""


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        yield Client()


def recovery() -> tuple[None, str]:
    """Return None: a job of a dead worker runs again only if a task of the application retries stalled jobs."""
    return None, "only a task of the application retries stalled jobs"
