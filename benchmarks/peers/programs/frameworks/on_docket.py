"""docket: `docket worker --tasks programs.frameworks.on_docket:tasks`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from docket import CurrentDocket, Docket, Worker
from docket.execution import ExecutionState

from ..setup import CHILDREN, REDIS_URL, TIMES
from .handlers import echo, hang, nap, noop

BLOCKING = False
BULK = True
RESULTS = True

_NAME = "bench"


async def spread(number: int, docket: Docket = CurrentDocket()) -> int:
    TIMES.begin(number)
    children = await docket.add_many([docket.call(noop)(child) for child in range(1, 1 + CHILDREN)])
    for child in children:
        await child.get_result()
    TIMES.end(number)
    return number + 1


tasks = [noop, echo, nap, hang, spread]
_TASKS = {task.__name__: task for task in tasks}


class Client:
    def __init__(self, docket: Docket) -> None:
        self._docket = docket

    async def enqueue(self, task: str, *arguments: Any) -> Any:
        return await self._docket.add(_TASKS[task])(*arguments)

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        return await self._docket.add_many([self._docket.call(_TASKS[task])(*its) for its in arguments])

    async def ready(self, handle: Any) -> bool:
        await handle.sync()
        return handle.state is ExecutionState.COMPLETED

    async def read(self, handle: Any) -> Any:
        return await handle.get_result()


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    async with Docket(name=_NAME, url=REDIS_URL) as docket:
        yield Client(docket)


def recovery() -> tuple[float, str]:
    """Return the default seconds of silence after which a task is redelivered, and where it is defined."""
    default = inspect.signature(Worker).parameters["redelivery_timeout"].default
    return default.total_seconds(), "Worker(redelivery_timeout)"
