"""`python -m benchmarks.scale.agent_process CONCURRENCY`: a worker of sleeping agents.

PERDURE_* configures it. It reports when it has joined. After SIGTERM it prints JSON: the times in milliseconds from
the end of each sleep to the handler, with the end of the sleep in seconds of the epoch.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from datetime import UTC, datetime

from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from ..support.machine import run
from ..support.processes import report

__all__ = ["app"]

app = App("bench")

_late: list[tuple[float, float]] = []


@app.task
async def agent(ctx: Context, first: float, every: float, wakings: int, steps: int, think: float) -> None:
    """Sleep, record steps, and sleep again. first: end of the first sleep in seconds of the epoch."""
    for number in range(wakings):
        due = first + number * every
        await ctx.sleep_until(datetime.fromtimestamp(due, UTC))
        if steps:
            await ctx.step("wake", _woken, due)
        for _ in range(steps - 1):
            await ctx.step("think", asyncio.sleep, think)


async def _woken(due: float) -> None:
    """Note how late it is, once for each waking."""
    _late.append((due, (time.time() - due) * 1000))


async def _work(concurrency: int) -> None:
    async with Worker(app, concurrency=concurrency) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        report()
        await worker.run()
    print(json.dumps(_late), flush=True)


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work(int(sys.argv[1])))
