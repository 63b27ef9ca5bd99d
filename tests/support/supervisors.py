"""Supervisor processes for tests: `perdure worker run` with the program supervised.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import psutil
from perdure import Producer
from perdure.queues import list_supervisors
from perdure.worker.settings import Settings

from tests.support.command_line import COMMAND
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses
from tests.support.workers import BOUND, wait_until

PROGRAM = PROGRAMS / "supervised.py"


class Supervisors:
    """Supervisors of one test. None of their processes outlives it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.journal = WorkerProcesses(settings, folder / "journal")
        self.journal.journal.touch()
        self.environment = os.environ | {
            "JOURNAL": str(self.journal.journal),
            "PERDURE_REDIS_URL": settings.redis_url,
            "PERDURE_NAMESPACE": settings.namespace,
            "PERDURE_RESTART_DELAYS": "0.1",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self._seen: set[psutil.Process] = set()

    def start(
        self, processes: int = 2, *, grace: float = 5.0, concurrency: int = 8, lease: float = 60.0
    ) -> psutil.Process:
        """Start a supervisor, without waiting for it.

        Args:
            lease: By default, no task is resumed because a lease expired.
        """
        return self.run("--processes", str(processes), "--concurrency", str(concurrency), grace=grace, lease=lease)

    def run(self, *options: str, grace: float = 5.0, lease: float = 60.0) -> psutil.Process:
        """Start `perdure worker run` with options, without waiting for it."""
        environment = self.environment | {"PERDURE_GRACE": str(grace), "PERDURE_LEASE": str(lease)}
        command = [*COMMAND, "worker", "run", f"{PROGRAM}:app", *options]
        self._started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        return psutil.Process(self._started[-1].pid)

    def children(self, supervisor: psutil.Process) -> set[psutil.Process]:
        found = set(supervisor.children())
        self._seen |= found
        return found

    async def ended(self) -> int:
        """The exit code of the supervisor that was started last."""
        with anyio.fail_after(BOUND):
            while self._started[-1].poll() is None:  # noqa: ASYNC110 - Popen has no event for the exit
                await anyio.sleep(0.01)
        return self._started[-1].returncode

    def close(self) -> None:
        for supervisor in self._started:
            if supervisor.poll() is None:
                self.children(psutil.Process(supervisor.pid))
                supervisor.kill()
            supervisor.wait(BOUND)
        for one in self._seen:
            if one.is_running():
                one.kill()


async def all_work(producer: Producer, workers: int) -> None:
    """Wait until a supervisor reports this number of working children, and none that starts or stops."""

    async def right() -> bool:
        found = await list_supervisors(producer.gateway, producer.namespace)
        states = [(child.role, child.state) for info in found for child in info.children]
        return states.count(("worker", "working")) == workers and {state for _, state in states} == {"working", "idle"}

    await wait_until(right, f"{workers} workers that work")
