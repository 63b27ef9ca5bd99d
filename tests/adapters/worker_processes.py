"""Worker processes of a program, which are killed and frozen, and the journal in which the program notes its calls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

BOUND = 30.0
"""Seconds after which a wait of a test fails."""


def note(call: str) -> None:
    """Append a call to the journal, in a program that a worker process runs."""
    with Path(os.environ["JOURNAL"]).open("a") as journal:
        journal.write(f"{call}\n")


async def hang_at(call: str) -> None:
    """Wait for ever in this call if the process was started to hang there, so that the test kills or freezes it."""
    if os.environ.get("HANG") == call:
        note(f"hangs in {call}")
        if path := os.environ.get("RELEASE"):
            while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240, PTH110 - a file has no event
                await asyncio.sleep(0.01)
        else:
            await asyncio.Event().wait()


class WorkerProcesses:
    """Worker processes of one test.

    Attributes:
        journal: file of the calls.
        release: file at which a frozen process that hangs goes on.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.journal = folder / "journal"
        self.release = folder / "release"
        self.journal.touch()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *, hang: str = "", lease: float = 1.0) -> subprocess.Popen[bytes]:
        """Start a worker; `hang` is the call at which it hangs."""
        environment = os.environ | {
            "JOURNAL": str(self.journal),
            "HANG": hang,
            "RELEASE": str(self.release),
            "PERDURE_LEASE": str(lease),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        process = subprocess.Popen([sys.executable, self.program], env=environment)
        self.processes.append(process)
        return process

    async def noted(self, call: str) -> None:
        """Wait until a call is in the journal."""
        async with asyncio.timeout(BOUND):
            while call not in self.journal.read_text().splitlines():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)

    def calls(self) -> Counter[str]:
        """Return the calls by name, and how often each was made."""
        return Counter(line for line in self.journal.read_text().splitlines() if not line.startswith("hangs"))

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(BOUND)

    async def freeze(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process without ending it."""
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(BOUND):
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def thaw(self, process: subprocess.Popen[bytes]) -> None:
        """Let a frozen process go on, out of the call in which it hangs."""
        self.release.touch()
        process.send_signal(signal.SIGCONT)


@contextmanager
def worker_processes(program: Path, folder: Path) -> Iterator[WorkerProcesses]:
    """Yield the worker processes of a test, which are killed at its end."""
    processes = WorkerProcesses(program, folder)
    try:
        yield processes
    finally:
        for process in processes.processes:
            if process.poll() is None:
                process.kill()
                process.wait(BOUND)
