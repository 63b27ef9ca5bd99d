"""An app for test_crashing_task.py: tasks of two steps, one of which kills its process in the second.

What happens goes into the journal. In the second step all wait until there is a file that lets them go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import anyio
from perdure import App, Context, Retry, current_step
from perdure.worker.durable.steps.current import CURRENT_RUN

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
GATES = Path(os.environ["GATES"])

app = App("poisonous")


def note(what: str, number: int) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {number}\n".encode())


async def first(number: int) -> int:
    note("first", number)
    return number


async def second(number: int, poison: bool) -> int:
    note("begin", number)
    while not (GATES / ("poison" if poison else "innocent")).exists():  # noqa: ASYNC110 - a file tells of nothing
        await anyio.sleep(0.01)
    if poison:
        os.kill(os.getpid(), signal.SIGKILL)
    note("end", number)
    return number


@app.task(retry=Retry(max_crashes=1, base=0.01))
async def job(ctx: Context, number: int, poison: bool) -> int:
    """Two steps, one after the other."""
    return await ctx.step("second", second, await ctx.step("first", first, number), poison)


async def leave() -> None:
    sys.exit(2)


@app.task(retry=Retry(max_crashes=1, base=0.01))
async def leaver(ctx: Context, number: int) -> None:
    """End the event loop of the process: asyncio does so if a task raises SystemExit."""
    note("begin", number)
    await asyncio.gather(leave(), asyncio.sleep(60))


async def saving(number: int, kills: int, changing: bool) -> int:
    """Save its number of crashes, if `changing`, else always the same; then kill its process, so many times."""
    note("begin", number)
    run = CURRENT_RUN.get()
    assert run is not None
    crashes = run.history.counters.crashes
    await current_step().save(crashes if changing else "started")
    if crashes < kills:
        os.kill(os.getpid(), signal.SIGKILL)
    return crashes


@app.task(retry=Retry(max_crashes=1, base=0.01))
async def saver(ctx: Context, number: int, kills: int, changing: bool) -> int:
    return await ctx.step("save", saving, number, kills, changing)


@app.task(retry=Retry(max_crashes=1, base=0.01))
async def stepper(ctx: Context, number: int, kills: int) -> int:
    """Record one new step per run, and kill the process before the event loop does anything else, so many times."""
    for crash in range(kills):
        await ctx.step("first", first, number)
        if crash == ctx.crashes:
            os.kill(os.getpid(), signal.SIGKILL)
    return ctx.crashes
