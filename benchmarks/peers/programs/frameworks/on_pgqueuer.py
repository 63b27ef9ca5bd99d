"""PgQueuer: `pgq run programs.frameworks.on_pgqueuer:worker`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from ..setup import DATABASE_URL
from . import handlers

BLOCKING = False
BULK = True
RESULTS = False

_TASKS = ("noop", "echo", "nap", "hang")


@asynccontextmanager
async def worker() -> AsyncIterator[PgQueuer]:
    async with driver() as connected:
        manager = PgQueuer(connected)
        for name in _TASKS:
            register(manager, name)
        yield manager


@asynccontextmanager
async def driver() -> AsyncIterator[AsyncpgDriver | AsyncpgPoolDriver]:
    if "BENCH_POOL" in os.environ:
        async with asyncpg.create_pool(DATABASE_URL) as pool:
            yield AsyncpgPoolDriver(pool)
    else:
        connection = await asyncpg.connect(DATABASE_URL)
        try:
            yield AsyncpgDriver(connection)
        finally:
            await connection.close()


def register(manager: PgQueuer, name: str) -> None:
    handler = getattr(handlers, name)

    @manager.entrypoint(name)
    async def run(job: Job) -> None:
        await handler(*json.loads(job.payload))


class Client:
    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._queries = Queries(AsyncpgPoolDriver(pool))

    async def enqueue(self, task: str, *arguments: Any) -> Any:
        (found,) = await self._queries.enqueue(task, json.dumps(arguments).encode())
        return found

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        payloads = [json.dumps(its).encode() for its in arguments]
        return await self._queries.enqueue([task] * len(payloads), payloads, [0] * len(payloads))

    async def ready(self, handle: Any) -> bool:
        found = await self._queries.job_status([handle])
        return [status for _, status in found] == ["successful"]

    async def read(self, handle: Any) -> None:
        """There is no result."""


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    async with asyncpg.create_pool(DATABASE_URL) as pool:
        await Queries(AsyncpgPoolDriver(pool)).install()
        yield Client(pool)


def recovery() -> tuple[float, str]:
    """Return the default seconds without a heartbeat after which a job is picked again, and where it is defined."""
    default = inspect.signature(QueueManager.run).parameters["heartbeat_timeout"].default
    return default.total_seconds(), "run(heartbeat_timeout)"
