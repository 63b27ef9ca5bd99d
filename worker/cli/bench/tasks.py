"""The tasks that are measured. Worker processes load this as `perdure.worker.cli.bench.tasks:app`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...app import App
from ...durable import Context

__all__ = ["app", "hear_starts", "noop", "pick_up", "walk"]

app = App("bench")

_hear_start: list[Callable[[float], None]] = []


def hear_starts(listener: Callable[[float], None]) -> None:
    """Have `pick_up` tell when it begins, in seconds of `time.perf_counter`."""
    _hear_start[:] = [listener]


@app.task
async def noop(ctx: Context, data: str) -> None:
    """Nothing."""


@app.task
async def pick_up(ctx: Context) -> None:
    """Tells when it begins."""
    _hear_start[0](time.perf_counter())


@app.task(durability="sync")
async def walk(ctx: Context, steps: int) -> tuple[float, float]:
    """Steps, each recorded before the next one begins; returns when it began and ended."""
    began = time.perf_counter()
    for number in range(steps):
        await ctx.step("step", _echo, number)
    return began, time.perf_counter()


async def _echo(number: int) -> int:
    return number
