"""`python -m benchmarks.support.worker_process`: a worker process to measure from outside, configured by PERDURE_*."""

from __future__ import annotations

import asyncio
import math
import signal
import time

from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from .machine import run
from .processes import report

__all__ = ["TICK", "app"]

TICK = 0.002
"""Seconds of one step of `tick`."""

PACE = 0.02
"""Seconds of one step of `pace`."""

app = App("bench")


@app.task
async def pick_up(ctx: Context) -> None:
    """Report when the handler starts."""
    report()


@app.task
async def await_mail(ctx: Context) -> None:
    """Wait for a message, and report when the handler has it."""
    await ctx.inbox(wait=math.inf)
    report()


@app.task
async def hang(ctx: Context) -> None:
    """Run one step that does not end."""
    await ctx.step("hang", _hang)


@app.task
async def hang_once(ctx: Context) -> None:
    """Hang after the first step, but not in a resumed run."""
    await ctx.step("first", _instant)
    if ctx.resumed:
        report()
    else:
        await ctx.step("hang", _hang)


@app.task
async def tick(ctx: Context) -> None:
    """Run many short steps."""
    for _ in range(10_000):
        await ctx.step("tick", _tick)


@app.task
async def pace(ctx: Context) -> None:
    """Run slower steps, so that unread reports do not fill the pipe."""
    for _ in range(10_000):
        await ctx.step("pace", _pace)


@app.task
async def speak(ctx: Context, items: int, rate: float) -> None:
    """Emit items with the present time, so many a second."""
    start = time.monotonic()
    for number in range(items):
        if (early := start + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(early)
        await ctx.emit(time.monotonic(), to="times")


async def _instant() -> None:
    """Do nothing."""


async def _hang() -> None:
    report()
    await asyncio.Event().wait()


async def _pace() -> None:
    report()
    await asyncio.sleep(PACE)


async def _tick() -> None:
    report()
    await asyncio.sleep(TICK)


async def _work() -> None:
    async with Worker(app) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        report()
        await worker.run()


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work())
