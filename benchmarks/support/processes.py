"""Child processes that report times to the benchmark.

They write `time.monotonic()` to stdout, one time per line, the first when they are ready. On Linux and macOS all
processes share this clock.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .deployment import Deployment

__all__ = ["ROOT", "Child", "report", "started"]

ROOT = Path(__file__).parents[2]
_READY_WITHIN = 60.0
_LONGEST_LINE = 1 << 24


def report() -> None:
    """Report the present time, in a child process."""
    print(time.monotonic(), flush=True)


class Child:
    """A child process, seen from its parent."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def reported(self, within: float) -> float:
        """Return the next reported time; wait for it up to `within` seconds."""
        return float(await self.line(within))

    async def line(self, within: float) -> str:
        """Return the next line, for processes that report more than times."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured process exited early, with exit code {await self._process.wait()}")
        return line.decode()

    def send(self, number: signal.Signals) -> float:
        """Send a signal; return when."""
        now = time.monotonic()
        self._process.send_signal(number)
        return now

    async def end(self) -> None:
        """Kill the process if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def started(module: str, deployment: Deployment, *arguments: str) -> AsyncIterator[Child]:
    """Run a module as a process; it is ready on entry and dead on exit."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=PIPE,
        env=deployment.environment,
        cwd=ROOT,
        limit=_LONGEST_LINE,
    )
    child = Child(process)
    try:
        await child.reported(_READY_WITHIN)
        yield child
    finally:
        await child.end()
