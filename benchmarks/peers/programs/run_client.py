"""`python -m programs.run_client MODULE TASK COUNT WITHIN FILL LIMIT`: the client of a queue benchmark.

It enqueues COUNT tasks, fewer if that takes longer than WITHIN seconds, reports how long that took, and waits until the
harness has started the worker. Then it watches the time file until every task has run and the client can read the last
result, or until LIMIT seconds after the start of the first handler.

FILL is `singly` (calls awaited by 32 coroutines; a plain loop if the client blocks) or `bulk` (the bulk call if the
project has one, else singly). With the suffix `-only`, nothing is watched. With `-trickle`, a no-op task follows every
quarter of a second until the program is ended, because some projects look for lost tasks only when new ones arrive.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, cast

from .client import AsyncClient, BlockingClient, load
from .enqueue import Enqueued, enqueue_all, enqueue_all_blocking
from .harness import report, reporting_failure, run, wait
from .watch import Reader, watch

_TEXT = "0123456789abcdef" * 64
"""1,024 bytes."""

_TRICKLE = 0.25


def arguments(task: str, count: int) -> list[tuple[Any, ...]]:
    """Return the arguments of every task; the first is its number."""
    return [(number, _TEXT) for number in range(count)] if task == "echo" else [(number,) for number in range(count)]


def expected(task: str, number: int) -> object:
    """Return the expected result of a task."""
    return _TEXT if task == "echo" else number + 1


async def _run(module: str, task: str, count: int, within: float, how: str, limit: float) -> None:
    peer = load(module)
    bulk = how.startswith("bulk") and peer.BULK
    if peer.BLOCKING:
        with cast("AbstractContextManager[BlockingClient]", peer.connect()) as blocking:
            enqueued = enqueue_all_blocking(blocking, task, arguments(task, count), bulk=bulk, within=within)

            async def enqueue(task: str, *arguments: Any) -> Any:
                return blocking.enqueue(task, *arguments)

            await _after(enqueued, enqueue, Reader(blocking.ready, blocking.read, kept=peer.RESULTS), task, how, limit)
    else:
        async with cast("AbstractAsyncContextManager[AsyncClient]", peer.connect()) as client:
            enqueued = await enqueue_all(client, task, arguments(task, count), bulk=bulk, within=within)
            await _after(
                enqueued, client.enqueue, Reader(client.ready, client.read, kept=peer.RESULTS), task, how, limit
            )


async def _after(
    enqueued: Enqueued, enqueue: Callable[..., Awaitable[Any]], reader: Reader, task: str, how: str, limit: float
) -> None:
    report(enqueued=len(enqueued.handles), seconds=enqueued.seconds, bulk=enqueued.bulk)
    if how.endswith("-only"):
        return
    while how.endswith("-trickle"):
        await enqueue("noop", len(enqueued.handles))
        await asyncio.sleep(_TRICKLE)
    await asyncio.to_thread(wait)
    began = time.monotonic()
    seen = await watch(enqueued.handles, reader, lambda number: expected(task, number), limit, whole=task != "spread")
    report(**seen, waited=time.monotonic() - began)


if __name__ == "__main__":
    _, module, task, count, within, how, limit = sys.argv
    with reporting_failure():
        run(_run(module, task, int(count), float(within), how, float(limit)))
