"""A worker process whose tasks use limits, and note in the journal when they are inside.

Lines of the journal: process, what happened, name of the task. `begin` and `end` are in the order in which they
happened, whatever the processes. A task waits inside until the test pushes a token of its name.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import anyio
from perdure import App, Context, Retry, Worker

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("limited")
one = app.limit("one", total=1)
calls = app.limit("calls", total=1)


def note(what: str, name: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {name}\n".encode())


async def wait_for_token(name: str) -> None:
    gateway = app.producer.gateway
    key = f"{{{app.settings.namespace}}}:token:{name}"
    while await gateway.command("LPOP", key) is None:  # noqa: ASYNC110 - the test pushes it
        await anyio.sleep(0.01)


async def inside(ctx: Context, name: str) -> None:
    note("begin", name)
    try:
        await wait_for_token(name)
    except BaseException:
        stop = ctx.stopping
        note(f"stopped {stop and stop.reason}", name)
        raise
    note("end", name)


@app.task(limits=[one], retry=Retry(max_attempts=1, max_crashes=1000))
async def work(ctx: Context, name: str) -> None:
    await inside(ctx, name)


@app.task(limits=[one], retry=Retry(max_attempts=1, max_crashes=1000))
async def short(ctx: Context, name: str) -> None:
    note("begin", name)
    await anyio.sleep(0.02)
    note("end", name)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def call(ctx: Context, name: str) -> None:
    async with ctx.limit("calls"):
        await inside(ctx, name)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def call_in_step(ctx: Context, name: str) -> None:
    async def step() -> None:
        async with ctx.limit("calls"):
            await inside(ctx, name)

    await ctx.step("call", step)


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
