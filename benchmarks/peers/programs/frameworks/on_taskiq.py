"""taskiq-redis: `taskiq worker programs.frameworks.on_taskiq:broker`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskiq.funcs import gather
from taskiq.serializers import JSONSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from ..setup import CHILDREN, RECOVERY, REDIS_URL, TIMES
from . import handlers

BLOCKING = False
BULK = False
RESULTS = True

broker = RedisStreamBroker(
    url=REDIS_URL, **({} if RECOVERY is None else {"idle_timeout": int(RECOVERY * 1000)})
).with_result_backend(RedisAsyncResultBackend(redis_url=REDIS_URL, serializer=JSONSerializer()))

noop = broker.task(task_name="noop")(handlers.noop)
echo = broker.task(task_name="echo")(handlers.echo)
nap = broker.task(task_name="nap")(handlers.nap)
hang = broker.task(task_name="hang")(handlers.hang)


@broker.task(task_name="spread")
async def spread(number: int) -> int:
    TIMES.begin(number)
    await gather(*[await noop.kiq(child) for child in range(1, 1 + CHILDREN)])
    TIMES.end(number)
    return number + 1


_TASKS = {"noop": noop, "echo": echo, "nap": nap, "hang": hang, "spread": spread}


class Client:
    async def enqueue(self, task: str, *arguments: Any) -> Any:
        return await _TASKS[task].kiq(*arguments)

    async def ready(self, handle: Any) -> bool:
        return await handle.is_ready()

    async def read(self, handle: Any) -> Any:
        return (await handle.get_result()).return_value


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    await broker.startup()
    try:
        yield Client()
    finally:
        await broker.shutdown()


def recovery() -> tuple[float, str]:
    """Return the default seconds of silence after which a message is claimed, and where it is defined."""
    default = inspect.signature(RedisStreamBroker).parameters["idle_timeout"].default
    return default / 1000, "RedisStreamBroker(idle_timeout)"
