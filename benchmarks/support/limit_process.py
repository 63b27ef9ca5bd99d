"""`python -m benchmarks.support.limit_process`: a worker with tasks of a limit of one, configured by PERDURE_*."""

from __future__ import annotations

import asyncio
import signal

from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from .machine import run
from .processes import report

__all__ = ["app", "serial"]

BUSY = 0.005
"""Seconds that a handler takes."""

app = App("bench")
alone = app.limit("alone", total=1)


@app.task(limits=[alone], queue="bench")
async def serial(ctx: Context) -> None:
    """Report when the handler starts, and when it ends."""
    report()
    await asyncio.sleep(BUSY)
    report()


async def _work() -> None:
    async with Worker(app) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        report()
        await worker.run()


if __name__ == "__main__":
    configure_logging("ERROR")
    run(_work())
