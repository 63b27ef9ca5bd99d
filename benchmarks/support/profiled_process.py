"""`python -m benchmarks.support.profiled_process SCENARIO COUNT FILE`: a worker under py-spy, configured by PERDURE_*.

It uses what every version of Perdure has, so that an older one can be profiled. It prints the seconds of CPU that
the thread of the worker took. FILE gets the samples, a stack in a line.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from perdure import App, Context, Settings, Worker

from .machine import run

__all__ = ["CONCURRENCY", "RATE", "profiler"]

CONCURRENCY = 32
RATE = 250
"""Samples in a second."""

_ATTACHED = b"Sampling process"
"""Output of py-spy once it takes samples."""


def profiler() -> str | None:
    """Return the path of py-spy, which is beside this interpreter or on PATH; None if it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@asynccontextmanager
async def _profiled(file: Path) -> AsyncIterator[None]:
    # A process that is stopped for each sample stops at the end of a system call, which gets too many of them then.
    options = ("--nonblocking", "--rate", str(RATE), "--nolineno", "--format", "raw", "--output", str(file))
    command = (profiler() or "py-spy", "record", "--pid", str(os.getpid()), *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    assert process.stdout is not None
    said = b""
    while _ATTACHED not in said:
        more = await process.stdout.read(1 << 12)
        if not more:
            raise SystemExit(said.decode().strip() or "py-spy ended")
        said += more
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()


async def main(scenario: str, count: int, file: Path) -> None:
    """Run `count` no-op tasks, or one task of `count` durable steps."""
    settings = Settings(redis_url=os.environ["PERDURE_REDIS_URL"], namespace=os.environ["PERDURE_NAMESPACE"])
    app = App("bench", settings=settings)

    @app.task
    async def noop(ctx: Context, number: int) -> int:
        return number

    @app.task
    async def walk(ctx: Context, steps: int) -> None:
        for number in range(steps):
            await ctx.step("step", noop_step, number)

    async def noop_step(number: int) -> int:
        return number

    async with app:
        if scenario == "tasks":
            await noop.enqueue_many({"number": number} for number in range(count))
        else:
            await walk.enqueue(count)
        async with Worker(app, concurrency=CONCURRENCY) as worker, _profiled(file):
            began = time.thread_time()
            await worker.run(burst=True)
            print(time.thread_time() - began)


if __name__ == "__main__":
    run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
