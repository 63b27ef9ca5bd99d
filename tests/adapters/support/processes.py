"""Worker processes of a program, which a test kills, freezes and starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.adapters.support.journal import Journal

_ROOT: Final = Path(__file__).parents[3]
_PAUSE: Final = 0.01
BOUND: Final = 60.0
"""Seconds after which a wait of a test fails."""

Process = subprocess.Popen[bytes]


class WorkerProcesses:
    """Worker processes of one test, on the server and in the namespace of the fixture `perdure`.

    Attributes:
        journal: the calls that the program notes.
    """

    def __init__(self, program: str, journal: Journal, lease: float) -> None:
        self.journal = journal
        self._program = program
        self._lease = lease
        self._processes: list[Process] = []

    def start(self, *options: str, **environment: str) -> Process:
        """Start a worker. options: further ones of `perdure worker run`; environment: further variables."""
        command = [str(Path(sys.executable).with_name("perdure")), "worker", "run", self._program, "--no-supervisor"]
        return self.start_command([*command, *options], **environment)

    def start_command(self, command: list[str], **environment: str) -> Process:
        """Start another program than a worker with the same variables, as a server."""
        variables = {
            **os.environ,
            **self.journal.environment,
            "PERDURE_LEASE": f"{self._lease:g}",
            "PYTHONPATH": str(_ROOT),
            **environment,
        }
        process = subprocess.Popen(command, cwd=_ROOT, env=variables)
        self._processes.append(process)
        return process

    async def kill(self, process: Process) -> None:
        """Kill a process with SIGKILL."""
        process.kill()
        await asyncio.to_thread(process.wait, BOUND)

    async def stop(self, process: Process) -> None:
        """Let a worker end: it puts back what it runs. Raises `subprocess.TimeoutExpired`."""
        process.terminate()
        await asyncio.to_thread(process.wait, BOUND)

    async def freeze(self, process: Process) -> None:
        """Stop a process with SIGSTOP, and wait until it is stopped."""
        process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self, process: Process) -> None:
        """Let a frozen process continue."""
        process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(BOUND)


@contextmanager
def worker_processes(program: str, folder: Path, *, lease: float = 1.0) -> Iterator[WorkerProcesses]:
    """Yield the worker processes of a test, which end with it.

    Args:
        program: the app, as `module:app`, with `tests.adapters.NAME.` before the name of a module of the tests.
        folder: folder of the journal.
        lease: seconds after which another worker takes over from a killed or frozen one.
    """
    processes = WorkerProcesses(program, Journal(folder / "journal.txt"), lease)
    try:
        yield processes
    finally:
        processes.close()


async def until(holds: Callable[[], Any | Awaitable[Any]], what: str, *, timeout: float = BOUND) -> Any:
    """Wait until a function returns something true, and return it.

    Args:
        holds: the function; it may be async.
        what: the condition, for the error.
        timeout: seconds.

    Raises:
        TimeoutError: it does not hold in time.
    """
    try:
        async with asyncio.timeout(timeout):
            while True:
                found = holds()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(_PAUSE)
    except TimeoutError:
        raise TimeoutError(f"waited {timeout:g} s until {what}") from None
