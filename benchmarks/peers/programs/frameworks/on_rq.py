"""RQ: `python -m programs.frameworks.rq_worker`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import Redis
from rq import Queue
from rq.defaults import DEFAULT_MAINTENANCE_TASK_INTERVAL
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from ..setup import CHILDREN, REDIS_URL, TIMES
from . import blocking

BLOCKING = True
BULK = True
RESULTS = True

_MODULE = "programs.frameworks.on_rq"

redis = Redis.from_url(REDIS_URL)
queue = Queue(connection=redis, serializer=JSONSerializer)

noop = blocking.noop
echo = blocking.echo
nap = blocking.nap
hang = blocking.hang


def spread(number: int) -> int:
    """Enqueue children and a job that depends on them: with one job at a time, a parent cannot wait."""
    TIMES.begin(number)
    children = queue.enqueue_many([Queue.prepare_data(f"{_MODULE}.noop", (at,)) for at in range(1, 1 + CHILDREN)])
    queue.enqueue(f"{_MODULE}.joined", number, depends_on=children)
    return number + 1


def joined(number: int) -> int:
    TIMES.end(number)
    return number


class Client:
    def enqueue(self, task: str, *arguments: Any) -> Any:
        return queue.enqueue(f"{_MODULE}.{task}", *arguments)

    def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        return queue.enqueue_many([Queue.prepare_data(f"{_MODULE}.{task}", tuple(its)) for its in arguments])

    def ready(self, handle: Any) -> bool:
        return handle.get_status(refresh=True) is JobStatus.FINISHED

    def read(self, handle: Any) -> Any:
        return handle.return_value(refresh=True)


@contextmanager
def connect() -> Iterator[Client]:
    yield Client()
    redis.close()


def recovery() -> tuple[float | None, str]:
    """Return None: without retries, a job of a dead worker does not run again."""
    return None, f"found by maintenance every {DEFAULT_MAINTENANCE_TASK_INTERVAL} s and moved to the failed jobs"
