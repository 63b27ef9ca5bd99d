"""A worker process whose tasks have a plan, and a long step in which they are killed.

A resumed run notes in the journal what its handoff document says. Lines of the journal: process, what, task id.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import anyio
from perdure import App, Context, Retry, SyncContext, Worker

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("planning")
patient = Retry(max_attempts=1, max_crashes=1000)


def note(what: str, task_id: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {task_id}\n".encode())


def tell(ctx: Context | SyncContext) -> None:
    task_id, resumption = ctx.task_id, ctx.resumption
    if resumption is not None and (handoff := resumption.handoff) is not None:
        calls = ", ".join(call.call for call in handoff.dependencies.in_flight)
        steps = " ".join(step.key for step in (*handoff.in_progress, *handoff.pending))
        attention = handoff.to_markdown().partition("## Needs attention next")[2].partition("\n## ")[0]
        note(f"in flight: {calls}; attention: {'compute(' in attention}; left: {steps};", task_id)


async def compute(task_id: str, released: str) -> str:
    note("computes", task_id)
    while not await anyio.Path(released).exists():  # noqa: ASYNC110 - another process creates it
        await anyio.sleep(0.02)
    return "12"


def compute_in_thread(task_id: str, released: str) -> str:
    note("computes", task_id)
    while not Path(released).exists():
        time.sleep(0.02)
    return "12"


@app.task(retry=patient)
async def offer(ctx: Context, released: str) -> str:
    await ctx.plan(["fetch", "compute", "send"])
    tell(ctx)
    await ctx.step("fetch", note, "fetches", ctx.task_id)
    price = await ctx.step("compute", compute, ctx.task_id, released)
    await ctx.step("send", note, "sends", ctx.task_id)
    return price


@app.task(retry=patient)
def offer_in_thread(ctx: SyncContext, released: str) -> str:
    ctx.plan(["fetch", "compute", "send"])
    tell(ctx)
    ctx.step("fetch", note, "fetches", ctx.task_id)
    price = ctx.step("compute", compute_in_thread, ctx.task_id, released)
    ctx.step("send", note, "sends", ctx.task_id)
    return price


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
