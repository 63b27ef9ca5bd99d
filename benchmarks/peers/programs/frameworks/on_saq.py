"""SAQ: `saq programs.frameworks.on_saq.settings`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from saq import Job, Queue
from saq.job import TERMINAL_STATUSES

from ..setup import CHILDREN, CONCURRENCY, RECOVERY, REDIS_URL, TIMES
from . import handlers

BLOCKING = False
BULK = False
RESULTS = True

queue = Queue.from_url(REDIS_URL)


async def noop(ctx: Any, *, number: int) -> int:
    return await handlers.noop(number)


async def echo(ctx: Any, *, number: int, text: str) -> str:
    return await handlers.echo(number, text)


async def nap(ctx: Any, *, number: int) -> int:
    return await handlers.nap(number)


async def hang(ctx: Any, *, number: int) -> int:
    return await handlers.hang(number)


async def spread(ctx: Any, *, number: int) -> int:
    TIMES.begin(number)
    await ctx["worker"].queue.map("noop", [{"number": child} for child in range(1, 1 + CHILDREN)])
    TIMES.end(number)
    return number + 1


settings = {
    "queue": queue,
    "functions": [noop, echo, nap, hang, spread],
    "concurrency": CONCURRENCY,
} | ({} if RECOVERY is None else {"timers": {"sweep": int(RECOVERY)}})

# A job runs again only with retries: one retry, and a time limit after which it counts as stuck.
_HANG: dict[str, Any] = {} if RECOVERY is None else {"retries": 2, "timeout": int(RECOVERY)}
_OPTIONS: dict[str, dict[str, Any]] = {"hang": _HANG, "spread": {"timeout": 0}}


class Client:
    async def enqueue(self, task: str, *arguments: Any) -> Any:
        named = dict(zip(("number", "text"), arguments, strict=False))
        return await queue.enqueue(task, **named, **_OPTIONS.get(task, {}))

    async def ready(self, handle: Any) -> bool:
        job = await queue.job(handle.key)
        return job is not None and job.status in TERMINAL_STATUSES

    async def read(self, handle: Any) -> Any:
        await handle.refresh()
        return handle.result


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    await queue.connect()
    # A worker sweeps at its start and aborts jobs that it has dequeued but not marked yet. A sweep made now postpones
    # that one until the next is due.
    await queue.sweep(lock=int(RECOVERY or 60))
    try:
        yield Client()
    finally:
        await queue.disconnect()


def recovery() -> tuple[float | None, str]:
    """Return None: with the default number of retries, a job of a dead worker does not run again."""
    if Job(function="hang").retries > 1:
        return float(Job(function="hang").timeout), "Job(timeout)"
    return None, f"Job(retries={Job(function='hang').retries}): swept as aborted, not run again"
