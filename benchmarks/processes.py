"""Processes that tell when they began something, so that others can measure it.

They write `time.monotonic()` to their standard output, one time per line, the first when they are ready. On Linux and
macOS all processes share that clock.
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

from .place import Place

__all__ = ["ROOT", "Child", "started", "tell"]

ROOT = Path(__file__).parents[1]
_READY_WITHIN = 60.0


def tell() -> None:
    """In such a process: it begins now."""
    print(time.monotonic(), flush=True)


class Child:
    """A process that was started, seen from the one that started it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def told(self, within: float) -> float:
        """The next time it tells; waits for it up to `within` seconds."""
        return float(await self.line(within))

    async def line(self, within: float) -> str:
        """The next line it writes, for processes that tell of more than times."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured process ended too early, with exit code {await self._process.wait()}")
        return line.decode()

    def send(self, number: signal.Signals) -> float:
        """Send it a signal; returns when that was."""
        now = time.monotonic()
        self._process.send_signal(number)
        return now

    async def end(self) -> None:
        """Kill it, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def started(module: str, place: Place, *arguments: str) -> AsyncIterator[Child]:
    """A module of this package, run as a process at a place; ready on entry, dead on exit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{__package__}.{module}", *arguments, stdout=PIPE, env=place.environment, cwd=ROOT
    )
    child = Child(process)
    try:
        await child.told(_READY_WITHIN)
        yield child
    finally:
        await child.end()
