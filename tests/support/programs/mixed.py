"""App of a worker whose memory is observed: tasks of every outcome, and one that returns what the process holds."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import anyio
import psutil
from perdure import App, Context, Retry, current_step

QUICK = Retry(max_attempts=3, base=0.01, jitter=0.0)
ONCE = Retry(max_attempts=1)

app = App("mixed")


@app.task
async def plain(ctx: Context, number: int) -> dict[str, int]:
    return {"number": number}


@app.task
async def steps(ctx: Context, number: int) -> int:
    """Recorded steps, one with progress saved within, one that several make at once."""
    first = await ctx.step("first", lambda: number)
    second = await ctx.step("second", saving, first)
    async with anyio.create_task_group() as group:
        for name in ("left", "right"):
            group.start_soon(ctx.step, name, plus_one, second)
    return second


async def saving(number: int) -> int:
    await current_step().save({"at": number})
    return number + 1


def plus_one(number: int) -> int:
    return number + 1


@app.task(retry=QUICK)
async def mends(ctx: Context, number: int) -> int:
    """Fails at first."""
    await ctx.step("before", lambda: number)
    if ctx.attempt == 1:
        raise ValueError(f"not yet {number}")
    return number


@app.task(retry=ONCE)
async def dies(ctx: Context, number: int) -> None:
    await ctx.step("before", lambda: number)
    raise ValueError(f"never {number}")


@app.task(retry=ONCE, timeout=0.05)
async def dawdles(ctx: Context, number: int) -> None:
    await anyio.sleep(3600)


@app.task
async def many_steps(ctx: Context, number: int) -> None:
    """Run 500 steps, or until it is cancelled."""
    for one in range(500):
        await ctx.step(f"step {one}", plus_one, number)
        await anyio.sleep(0.005)


@app.task(queue="keyed")
async def keyed(ctx: Context, number: int) -> int:
    return number


@app.task(queue="looks")
async def look(ctx: Context) -> dict[str, int]:
    """Return the resources that the process holds after a garbage collection."""
    gc.collect()
    return {
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": psutil.Process().num_fds(),
        "memory": psutil.Process().memory_info().rss,
    }
