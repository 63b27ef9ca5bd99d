"""A worker of a parent and of its children, each child a line in the journal when it begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[3]))

from perdure import App, Context, Retry, Worker
from perdure.worker.runtime.shared_settings import WorkerTimings

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("family")
Worker.timings = WorkerTimings(sweep_interval=0.3, notice_interval=0.3)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def parent(ctx: Context) -> int:
    return os.getpid()


@app.task(queue="small", retry=Retry(max_attempts=1, max_crashes=1000))
async def child(ctx: Context, n: int) -> int:
    os.write(JOURNAL, f"{os.getpid()} begin {ctx.task_id}\n".encode())
    await anyio.sleep(0.01)
    if n % 50 == 49:
        raise ValueError(n)
    return n * n


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
