"""Several workers in one process: `python -m benchmarks.crowd WORKERS CONCURRENCY`, told by PERDURE_* what to work on.

It tells when all have joined. After SIGTERM it tells, as JSON, how many deliveries each worker settled, and the memory
of the process in bytes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from contextlib import AsyncExitStack

from perdure import App, Context, Worker
from perdure.worker.observe import configure_logging

from .machine import run
from .processes import tell

__all__ = ["app"]

app = App("crowd")


@app.task
async def noop(ctx: Context, number: int) -> int:
    return number


async def _work(count: int, concurrency: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        workers = [Worker(app, concurrency=concurrency) for _ in range(count)]
        for worker in workers:
            await stack.enter_async_context(worker)
        running = [asyncio.create_task(worker.run()) for worker in workers]
        tell()
        await stop.wait()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
    told = {"settled": [worker.settled for worker in workers], "memory": _memory()}
    print(json.dumps(told), flush=True)


def _memory() -> int:
    """The most that this process ever had resident, in bytes. Linux tells it in KiB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work(int(sys.argv[1]), int(sys.argv[2])))
