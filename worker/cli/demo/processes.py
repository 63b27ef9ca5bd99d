"""Worker processes of the demo: started, killed at random moments, replaced.

A process runs this module: `python -m perdure.worker.cli.demo.processes`. It reads its settings from the environment
and stops when its standard input ends. The kernel closes that pipe when the demo ends, so no worker outlives the demo.
"""

from __future__ import annotations

import os
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
import anyio.to_thread

from ...log import configure_process_log
from ...runtime.worker import Worker
from ..support.errors import Failed
from ..support.output import note
from .app import STEP_PAUSE, app
from .journal import JOURNAL_VARIABLE, read_step_runs

__all__ = ["Kill", "WorkerProcesses", "kill_workers"]

_POLL_INTERVAL: Final = 0.004


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL. at: seconds of the machine's monotonic clock. status: the exit status that the system reported."""

    at: float
    pid: int
    status: int


@dataclass(slots=True)
class WorkerProcesses:
    """Worker processes with the same settings and journal. They log to the demo's stderr."""

    settings: Mapping[str, object]
    journal: Path
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> int:
        """Start a process and return its id, without waiting until it is ready."""
        # In its own session: Ctrl-C reaches the demo only, which then kills its workers.
        command = [sys.executable, "-m", f"{__package__}.processes"]
        # Of the user's settings, the workers keep the encryption keys only.
        kept = {name: value for name, value in os.environ.items() if name[:8] != "PERDURE_" or "ENCRYPTION" in name}
        given = {f"PERDURE_{name.upper()}": str(value) for name, value in self.settings.items()}
        environment = kept | given | {JOURNAL_VARIABLE: str(self.journal)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        self.running[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> Kill:
        """Send SIGKILL to a process and wait for its exit status."""
        with self.running.pop(pid) as process:
            process.send_signal(signal.SIGKILL)
            return Kill(time.monotonic(), pid, process.wait())

    def kill_all(self) -> None:
        """Kill all processes that still run."""
        for pid in list(self.running):
            self.kill(pid)

    def check(self) -> None:
        """Raise `Failed` if a process exited without being killed."""
        for pid, process in self.running.items():
            if process.poll() is not None:
                raise Failed(f"could not continue the demo: worker {pid} exited with status {process.returncode}")


async def kill_workers(workers: WorkerProcesses, task: str, steps: int, count: int, kills: list[Kill]) -> None:
    """Kill `count` workers of a task at random moments of its first steps, replace each, and append to `kills`.

    Never returns; cancel it when the task has ended. Raises `Failed` if a worker exited by itself.
    """
    due = sorted(random.sample(range(1, steps * 4 // 5 + 1), count))
    while True:
        workers.check()
        runs = read_step_runs(workers.journal, task)
        if due and runs and runs[-1].pid in workers.running and len({run.step for run in runs}) >= due[0]:
            await anyio.sleep(random.uniform(0, STEP_PAUSE))  # noqa: S311 - not a secret
            kills.append(workers.kill(runs[-1].pid))
            workers.start()
            note(f"killed worker {kills[-1].pid} in step {runs[-1].step}")
            del due[0]
        await anyio.sleep(_POLL_INTERVAL)


async def _work() -> None:
    """Run tasks until standard input ends."""
    configure_process_log(app.settings.log_level)
    async with Worker(app, concurrency=1) as worker, anyio.create_task_group() as group:
        group.start_soon(worker.run)
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        worker.stop()


if __name__ == "__main__":
    anyio.run(_work)
