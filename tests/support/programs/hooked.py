"""An application with middleware and a lifespan, which log their calls to a journal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from perdure import App, Context, Middleware, Retry, Settlement, StepCall

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)


def note(what: str, key: str) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


class Notes(Middleware):
    async def run(self, ctx: Context, call_next: Any) -> Any:
        note("run", ctx.task_id)
        return await call_next()

    async def step(self, ctx: Context, step: StepCall, call_next: Any) -> Any:
        note("recorded" if step.recorded else "new", f"{ctx.task_id}:{step.key}")
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: Any) -> None:
        note(f"settle-{settlement.stop}", ctx.task_id)
        await call_next()


@asynccontextmanager
async def lifespan(app: App) -> AsyncIterator[int]:
    if "BROKEN" in os.environ:
        raise ConnectionRefusedError("no database")
    note("opened", app.name)
    yield os.getpid()
    note("closed", app.name)


app = App("hooked", middleware=[Notes()], lifespan=lifespan)


async def act(name: str) -> str:
    note("begin", name)
    return name


async def wait_for(name: str) -> str:
    note("begin", Path(name).name)
    while not Path(name).exists():  # noqa: ASYNC110, ASYNC240 - a file has no event
        await anyio.sleep(0.005)
    return name


@app.task(retry=Retry(max_attempts=1, max_crashes=10, base=0.0))
async def gated(ctx: Context, file: str) -> int:
    """Two quick steps, and one that waits for a file; returns the process in which the lifespan was opened."""
    await ctx.step("first", act, "first")
    await ctx.tool("second", act, "second")
    await ctx.step("wait", wait_for, file)
    found: int = ctx.resources
    return found
