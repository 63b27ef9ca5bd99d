"""dramatiq: `dramatiq programs.frameworks.on_dramatiq`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import RedisBackend

from ..setup import CHILDREN, RECOVERY, REDIS_URL, TIMES
from . import blocking

BLOCKING = True
BULK = False
RESULTS = True

_FOR_CHILDREN = 600_000
"""Milliseconds."""

broker = RedisBroker(url=REDIS_URL, **({} if RECOVERY is None else {"heartbeat_timeout": int(RECOVERY * 1000)}))
broker.add_middleware(Results(backend=RedisBackend(url=REDIS_URL)))
dramatiq.set_broker(broker)

noop = dramatiq.actor(store_results=True)(blocking.noop)
echo = dramatiq.actor(store_results=True)(blocking.echo)
nap = dramatiq.actor(store_results=True)(blocking.nap)
hang = dramatiq.actor(store_results=True)(blocking.hang)


@dramatiq.actor(store_results=True)
def spread(number: int) -> int:
    TIMES.begin(number)
    children = dramatiq.group([noop.message(child) for child in range(1, 1 + CHILDREN)]).run()
    for _ in children.get_results(block=True, timeout=_FOR_CHILDREN):
        pass
    TIMES.end(number)
    return number + 1


_TASKS = {"noop": noop, "echo": echo, "nap": nap, "hang": hang, "spread": spread}


class Client:
    def enqueue(self, task: str, *arguments: Any) -> Any:
        return _TASKS[task].send(*arguments)

    def ready(self, handle: Any) -> bool:
        try:
            handle.get_result(block=False)
        except ResultMissing:
            return False
        return True

    def read(self, handle: Any) -> Any:
        return handle.get_result(block=False)


@contextmanager
def connect() -> Iterator[Client]:
    yield Client()
    broker.close()


def recovery() -> tuple[float, str]:
    """Return the default seconds of silence after which a worker counts as dead, and where it is defined."""
    default = inspect.signature(RedisBroker).parameters["heartbeat_timeout"].default
    return default / 1000, "RedisBroker(heartbeat_timeout)"
