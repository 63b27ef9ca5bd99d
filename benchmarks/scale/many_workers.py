"""`python -m benchmarks.scale.many_workers WORKERS CONCURRENCY`: several workers in one process.

PERDURE_* configures them. It reports when all workers have joined. After SIGTERM it prints JSON: the deliveries settled
by each worker, and the memory of the process in bytes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from ..support.machine import run
from ..support.processes import report

__all__ = ["app"]

app = App("bench")


@app.task
async def noop(ctx: Context, number: int) -> int:
    return number


@app.task
async def hold(ctx: Context, seconds: float) -> None:
    """Hold a lease for a while."""
    await asyncio.sleep(seconds)


@app.task(durability="sync")
async def walk(ctx: Context, steps: int) -> None:
    for number in range(steps):
        await ctx.step("step", _echo, number)


async def _echo(number: int) -> int:
    return number


async def _work(count: int, concurrency: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        workers = [Worker(app, concurrency=concurrency) for _ in range(count)]
        for worker in workers:
            await stack.enter_async_context(worker)
        running = [asyncio.create_task(worker.run()) for worker in workers]
        report()
        await stop.wait()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
    found = {"settled": [worker.settled for worker in workers], "memory": _memory()}
    print(json.dumps(found), flush=True)


def _memory() -> int:
    """Return the peak resident memory in bytes. On Linux, getrusage includes that of the parent."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kibibytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(kibibytes) * 1024


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work(int(sys.argv[1]), int(sys.argv[2])))
