"""No-op tasks through one worker: read, run, result stored, acknowledged."""

from __future__ import annotations

import time
from collections.abc import Mapping

from perdure import Context, Worker

from ..raw import limits as raw_limits
from ..sizes import Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["THROUGHPUT"]

CONCURRENCY = 32


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    raw_limits.make_group(deployment)
    raw_limits.add(deployment, size.tasks)
    limit = raw_limits.read_and_delete(deployment, size.tasks)
    return {"throughput": Figure(await _tasks_per_second(deployment, size.tasks), limit)}


async def _tasks_per_second(deployment: Deployment, count: int) -> float:
    app = deployment.app()

    @app.task
    async def noop(ctx: Context, number: int) -> int:
        return number

    async with app:
        handles = await noop.enqueue_many({"number": number} for number in range(count))
        sample = dict(list(enumerate(handles))[:: max(1, count // 100)])
        del handles
        async with Worker(app, concurrency=CONCURRENCY) as worker:
            began = time.perf_counter()
            await worker.run(burst=True)
            took = time.perf_counter() - began
        for number, handle in sample.items():
            if await handle.result(timeout=0.1) != number:
                raise RuntimeError(f"task {handle.id} has the result of another task")
    return count / took


THROUGHPUT = Measure(
    "throughput",
    [
        Line(
            "throughput",
            f"no-op tasks, concurrency {CONCURRENCY}",
            "tasks/s",
            f"XREADGROUP + XACK + XDEL, {raw_limits.READ_BATCH} per round trip",
        )
    ],
    _round,
)
