"""A worker for tests under load: one kind of task, on several queues, that logs its start and its end.

The journal is a file outside of Redis, to which all workers append: worker, event, time (nanoseconds of the machine's
monotonic clock), which task.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Literal

import anyio
from perdure import App, Context, Retry, Worker

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

DURABILITY: Literal["sync", "replicated"] = "replicated" if os.environ["DURABILITY"] == "replicated" else "sync"

app = App("carrier")


def note(what: str, task_id: str) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {time.monotonic_ns()} {task_id}\n".encode())


async def half(task_id: str, pause: float) -> None:
    note("half", task_id)
    await anyio.sleep(pause)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def carry(ctx: Context, pause: float) -> str:
    """Take `pause` seconds, half of them in a step."""
    note("start", ctx.task_id)
    await ctx.options(durability=DURABILITY).step("half", half, ctx.task_id, pause / 2)
    note("recorded", ctx.task_id)
    await anyio.sleep(pause / 2)
    note("finish", ctx.task_id)
    return ctx.task_id


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1]), queues=os.environ["QUEUES"].split(",")) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
