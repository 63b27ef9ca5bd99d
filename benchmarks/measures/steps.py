"""Durable steps, each recorded before the next line of its handler runs."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from perdure import Context, Worker

from ..raw import limits as raw_limits
from ..sizes import Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["STEPS"]

TASKS = 32


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    raw_limits.make_group(deployment)
    alone = raw_limits.steps(deployment, size.steps, at_once=1)
    shared = raw_limits.steps(deployment, size.shared_steps, at_once=TASKS)
    return {
        "steps": Figure(await _steps_per_second(deployment, size.steps, tasks=1), alone),
        "steps_shared": Figure(
            await _steps_per_second(deployment.within("shared"), size.shared_steps, tasks=TASKS), shared
        ),
    }


async def _steps_per_second(deployment: Deployment, count: int, *, tasks: int) -> float:
    app = deployment.app()

    @app.task(durability="sync")
    async def walk(ctx: Context, steps: int) -> tuple[float, float]:
        began = perf_counter()
        for number in range(steps):
            await ctx.step("step", _echo, number)
        return began, perf_counter()

    each = count // tasks
    async with app:
        handles = await walk.enqueue_many({"steps": each} for _ in range(tasks))
        async with Worker(app, concurrency=tasks) as worker:
            await worker.run(burst=True)
        spans = [await handle.result(timeout=1) for handle in handles]
    return each * tasks / (max(end for _, end in spans) - min(start for start, _ in spans))


async def _echo(number: int) -> int:
    return number


STEPS = Measure(
    "steps",
    [
        Line("steps", "durable steps, one task", "steps/s", "EVALSHA check + HSET + XADD"),
        Line(
            "steps_shared", f"durable steps, {TASKS} tasks concurrently", "steps/s", f"the same, {TASKS} per round trip"
        ),
    ],
    _round,
)
