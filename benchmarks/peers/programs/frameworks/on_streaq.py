"""streaq: `streaq run programs.frameworks.on_streaq:worker`."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streaq import Worker
from streaq.task import TaskStatus

from ..setup import CHILDREN, CONCURRENCY, PREFETCH, RECOVERY, REDIS_URL, TIMES, UVLOOP
from . import handlers

BLOCKING = False
BULK = True
RESULTS = True

worker = Worker(
    redis_url=REDIS_URL,
    concurrency=CONCURRENCY,
    serializer=json.dumps,
    deserializer=json.loads,
    **({} if RECOVERY is None else {"idle_timeout": RECOVERY}),
    **({} if PREFETCH is None else {"prefetch": PREFETCH}),
    **({"anyio_kwargs": {"use_uvloop": True}} if UVLOOP else {}),
)

noop = worker.task(handlers.noop)
echo = worker.task(handlers.echo)
nap = worker.task(handlers.nap)
hang = worker.task(handlers.hang)


@worker.task
async def spread(number: int) -> int:
    TIMES.begin(number)
    children = [noop.enqueue(child) for child in range(1, 1 + CHILDREN)]
    await worker.enqueue_many(children)
    # Each result would need its own subscription; dependencies scale to many tasks.
    await joined.enqueue(number).start(after=[child.id for child in children])
    return number + 1


@worker.task
async def joined(number: int) -> int:
    """Run when all children have succeeded."""
    TIMES.end(number)
    return number


_TASKS = {"noop": noop, "echo": echo, "nap": nap, "hang": hang, "spread": spread}


class Client:
    async def enqueue(self, task: str, *arguments: Any) -> Any:
        return await _TASKS[task].enqueue(*arguments)

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        tasks = [_TASKS[task].enqueue(*its) for its in arguments]
        await worker.enqueue_many(tasks)
        return tasks

    async def ready(self, handle: Any) -> bool:
        return await handle.status() is TaskStatus.DONE

    async def read(self, handle: Any) -> Any:
        return (await handle.result()).result


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    async with worker:
        yield Client()


def recovery() -> tuple[float, str]:
    """Return the default seconds of silence after which a worker counts as dead, and where it is defined."""
    return inspect.signature(Worker).parameters["idle_timeout"].default, "Worker(idle_timeout)"
