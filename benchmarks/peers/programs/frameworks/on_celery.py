"""Celery: `celery -A programs.frameworks.on_celery worker`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, chord
from celery.result import AsyncResult
from kombu.transport.redis import Channel

from ..setup import CHILDREN, PREFETCH, RECOVERY, REDIS_URL, TIMES
from . import blocking

BLOCKING = True
BULK = False
RESULTS = True

app = Celery("programs.frameworks.on_celery", broker=REDIS_URL, backend=REDIS_URL)
app.conf.task_acks_late = "BENCH_ACKS_LATE" in os.environ
if PREFETCH is not None:
    app.conf.worker_prefetch_multiplier = PREFETCH
if RECOVERY is not None:
    app.conf.broker_transport_options = {"visibility_timeout": int(RECOVERY)}

noop = app.task(name="noop")(blocking.noop)
echo = app.task(name="echo")(blocking.echo)
nap = app.task(name="nap")(blocking.nap)
hang = app.task(name="hang")(blocking.hang)


@app.task(name="spread")
def spread(number: int) -> int:
    TIMES.begin(number)
    chord(noop.s(child) for child in range(1, 1 + CHILDREN))(joined.s(number))
    return number + 1


@app.task(name="joined")
def joined(results: list[int], number: int) -> int:
    """End the chord when all children have results: a task must not wait for the result of another."""
    TIMES.end(number)
    return len(results)


_TASKS = {"noop": noop, "echo": echo, "nap": nap, "hang": hang, "spread": spread}


class Client:
    def enqueue(self, task: str, *arguments: Any) -> AsyncResult:
        return _TASKS[task].delay(*arguments)

    def ready(self, handle: AsyncResult) -> bool:
        return handle.ready()

    def read(self, handle: AsyncResult) -> Any:
        return handle.result


@contextmanager
def connect() -> Iterator[Client]:
    yield Client()
    app.close()


def recovery() -> tuple[float | None, str]:
    """Return the default seconds until another worker gets an unacknowledged message, and where it is defined."""
    if not app.conf.task_acks_late:
        return None, "lost: acknowledged before it runs (task_acks_late=False)"
    return float(Channel.visibility_timeout), "Channel.visibility_timeout"
