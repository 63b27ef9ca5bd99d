"""Enqueueing: calls awaited by several coroutines, and one bulk call."""

from __future__ import annotations

import time
from collections.abc import Mapping

import anyio
from perdure import Context

from ..raw import limits as raw_limits
from ..sizes import Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["ENQUEUE"]

PRODUCERS = 32


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    limit = raw_limits.add(deployment, size.bulk)
    return {
        "enqueue": Figure(await _awaited_per_second(deployment, size.tasks), limit),
        "enqueue_bulk": Figure(await _bulk_per_second(deployment.within("bulk"), size.bulk), limit),
    }


async def _awaited_per_second(deployment: Deployment, count: int) -> float:
    app = deployment.app()
    numbers = iter(range(count))

    @app.task
    async def noop(ctx: Context, number: int) -> int:
        return number

    async def produce() -> None:
        for number in numbers:
            await noop.enqueue(number)

    async with app:
        began = time.perf_counter()
        async with anyio.create_task_group() as producers:
            for _ in range(PRODUCERS):
                producers.start_soon(produce)
        return count / (time.perf_counter() - began)


async def _bulk_per_second(deployment: Deployment, count: int) -> float:
    app = deployment.app()

    @app.task
    async def noop(ctx: Context, number: int) -> int:
        return number

    async with app:
        began = time.perf_counter()
        await noop.enqueue_many({"number": number} for number in range(count))
        return count / (time.perf_counter() - began)


_LIMIT = f"XADD, {raw_limits.WRITE_BATCH} per round trip"

ENQUEUE = Measure(
    "enqueue",
    [
        Line("enqueue", f"enqueue, awaited by {PRODUCERS} coroutines", "tasks/s", _LIMIT),
        Line("enqueue_bulk", "enqueue, one bulk call", "tasks/s", _LIMIT),
    ],
    _round,
)
