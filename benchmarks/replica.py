"""A worker process to be measured from outside: `python -m benchmarks.replica`, told by PERDURE_* what to work on."""

from __future__ import annotations

import asyncio
import signal

from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from .machine import run
from .processes import tell

__all__ = ["TICK", "app"]

TICK = 0.002
"""Seconds one step of `tick` takes."""

PACE = 0.02
"""The same of `pace`."""

app = App("bench")


@app.task
async def pick_up(ctx: Context) -> None:
    """Tells when the handler begins."""
    tell()


@app.task
async def hang(ctx: Context) -> None:
    """One step that does not end."""
    await ctx.step("hang", _hang)


@app.task
async def hang_once(ctx: Context) -> None:
    """Hangs after its first step, and not when it is resumed there."""
    await ctx.step("first", _instant)
    if ctx.resumed:
        tell()
    else:
        await ctx.step("hang", _hang)


@app.task
async def tick(ctx: Context) -> None:
    """Many short steps."""
    for _ in range(10_000):
        await ctx.step("tick", _tick)


@app.task
async def pace(ctx: Context) -> None:
    """The same, slower: what nobody reads must have room in the pipe."""
    for _ in range(10_000):
        await ctx.step("pace", _pace)


async def _instant() -> None:
    """Nothing to do."""


async def _hang() -> None:
    tell()
    await asyncio.Event().wait()


async def _pace() -> None:
    tell()
    await asyncio.sleep(PACE)


async def _tick() -> None:
    tell()
    await asyncio.sleep(TICK)


async def _work() -> None:
    async with Worker(app) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        tell()
        await worker.run()


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work())
