"""Worker processes of the demo: started, killed at random moments, replaced."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from ..support.errors import Failed
from ..support.output import note
from .app import STEP_PAUSE
from .journal import read_step_runs

__all__ = ["FILES_PER_KILL", "Kill", "WorkerProcesses", "draw_moments", "kill_workers"]

FILES_PER_KILL: Final = 10
"""With fewer files, the task could end before the last kill."""

_PROGRESS_TIMEOUT: Final = 60.0
_POLL_INTERVAL: Final = 0.004
_QUOTED_LINES: Final = 8


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL. at: seconds of the machine's monotonic clock. status: the exit status that the system reported."""

    at: float
    pid: int
    status: int


@dataclass(slots=True)
class WorkerProcesses:
    """Worker processes with the same environment and log file."""

    environment: Mapping[str, str]
    log: Path
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def pids(self) -> list[int]:
        """Processes that were started and not killed."""
        return list(self._running)

    def start(self) -> int:
        """Start a process and return its id, without waiting until it is ready."""
        # In its own session: Ctrl-C reaches the demo only, which then kills its workers.
        command = [sys.executable, "-m", f"{__package__}.worker"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self._running[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> Kill:
        """Send SIGKILL to a process and wait for its exit status."""
        with self._running.pop(pid) as process:
            process.send_signal(signal.SIGKILL)
            return Kill(time.monotonic(), pid, process.wait())

    def kill_all(self) -> None:
        """Kill all processes that still run."""
        for pid in self.pids:
            self.kill(pid)

    def check(self) -> None:
        """Raise `Failed`, with the end of the log, if a process exited without being killed."""
        for pid, process in self._running.items():
            if process.poll() is not None:
                lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_QUOTED_LINES:]
                end = " | ".join(line.strip() for line in lines) or "(empty)"
                raise Failed(f"worker {pid} exited by itself with status {process.returncode}; end of its log: {end}")


def draw_moments(seed: int, kills: int, steps: int) -> list[tuple[int, float]]:
    """Draw moments at random: a step (from 1) in the first four fifths, and seconds after its start.

    Equal seeds give equal moments.
    """
    drawing = random.Random(seed)  # noqa: S311 - not a secret
    drawn = sorted(drawing.sample(range(1, max(kills, steps * 4 // 5) + 1), kills))
    return [(step, drawing.uniform(0, STEP_PAUSE)) for step in drawn]


async def kill_workers(
    workers: WorkerProcesses, journal: Path, task: str, moments: list[tuple[int, float]], kills: list[Kill]
) -> None:
    """At each moment of a task, kill the worker that runs it, start another one, and append to `kills`.

    Never returns; cancel it when the task has ended. Raises `Failed` if a worker exited by itself or no step started
    for long.
    """
    seen, seen_at, due = 0, time.monotonic(), list(moments)
    while time.monotonic() < seen_at + _PROGRESS_TIMEOUT:
        workers.check()
        runs = read_step_runs(journal, task)
        if len(runs) > seen:
            seen, seen_at = len(runs), time.monotonic()
            started, pid = len({run.step for run in runs}), runs[-1].pid
            if due and started >= due[0][0] and pid in workers.pids:
                await anyio.sleep(due.pop(0)[1])
                kills.append(workers.kill(pid))
                workers.start()
                note(f"killed worker {pid} in step {started:,}")
        await anyio.sleep(_POLL_INTERVAL)
    raise Failed(f"could not continue the demo: no step started for {_PROGRESS_TIMEOUT:.0f} s")
