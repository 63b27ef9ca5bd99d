"""arq: `arq programs.frameworks.on_arq.WorkerSettings`."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

from ..setup import CHILDREN, CONCURRENCY, POLL, RECOVERY, REDIS_URL, TIMES
from . import handlers

BLOCKING = False
BULK = False
RESULTS = True

_EXTRA = 10
"""Seconds that arq adds to a job's time limit before it treats its worker as dead."""


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


async def noop(ctx: Any, number: int) -> int:
    return await handlers.noop(number)


async def echo(ctx: Any, number: int, text: str) -> str:
    return await handlers.echo(number, text)


async def nap(ctx: Any, number: int) -> int:
    return await handlers.nap(number)


async def hang(ctx: Any, number: int) -> int:
    return await handlers.hang(number)


async def spread(ctx: Any, number: int) -> int:
    TIMES.begin(number)
    children = [await ctx["redis"].enqueue_job("noop", child) for child in range(1, 1 + CHILDREN)]
    for child in children:
        await child.result()
    TIMES.end(number)
    return number + 1


class WorkerSettings:
    functions = (noop, echo, nap, hang, spread)
    redis_settings = RedisSettings.from_dsn(REDIS_URL)
    max_jobs = CONCURRENCY
    job_serializer = dumps
    job_deserializer = json.loads


if RECOVERY is not None:
    WorkerSettings.job_timeout = RECOVERY
if POLL is not None:
    WorkerSettings.poll_delay = POLL


class Client:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def enqueue(self, task: str, *arguments: Any) -> Any:
        return await self._pool.enqueue_job(task, *arguments)

    async def ready(self, handle: Any) -> bool:
        return await handle.result_info() is not None

    async def read(self, handle: Any) -> Any:
        return (await handle.result_info()).result


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    settings = WorkerSettings.redis_settings
    pool = await create_pool(settings, job_serializer=dumps, job_deserializer=json.loads)
    try:
        yield Client(pool)
    finally:
        await pool.aclose()


def recovery() -> tuple[float, str]:
    """Return the default seconds until another worker can take a running job, and where that default is defined."""
    default = inspect.signature(Worker).parameters["job_timeout"].default
    return default + _EXTRA, f"Worker(job_timeout) + {_EXTRA} s"
