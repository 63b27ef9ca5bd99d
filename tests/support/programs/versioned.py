"""A worker of one version of a task's code: CODE_VERSION. Its argument: how many tasks at once.

What it does is a line in JOURNAL, as in `replica.py`. The last step waits for a file to exist.
"""

from __future__ import annotations

import os
import sys

import anyio
from perdure import App, Context, Retry, Worker
from perdure.worker.runtime.stop_signals import stop_on_signals

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
VERSION = int(os.environ["CODE_VERSION"])

app = App("versioned")


def note(what: str, ctx: Context) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {ctx.task_id}\n".encode())


async def wait_for(path: str) -> None:
    while not await anyio.Path(path).exists():  # noqa: ASYNC110 - a file has no event
        await anyio.sleep(0.01)


@app.task(version=VERSION, retry=Retry(max_attempts=3, max_crashes=1000, base=0.0))
async def report(ctx: Context, gate: str) -> list[int]:
    note(f"run {ctx.version}", ctx)
    await ctx.step("read", note, "read", ctx)
    if ctx.version >= 2:
        await ctx.step("check", note, "check", ctx)
    note("waits", ctx)
    await ctx.step("wait", wait_for, gate)
    return [ctx.version, VERSION]


async def main() -> None:
    worker = Worker(app, concurrency=int(sys.argv[1]))
    async with stop_on_signals(worker.stop), worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
