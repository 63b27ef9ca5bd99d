"""The demo's worker processes: started, killed, replaced, stopped."""

from __future__ import annotations

import os
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

from ..failures import Failed

__all__ = ["Kill", "ReplicaEnded", "Replicas"]

MODULE: Final = f"{__package__}.replica"
STOPPED_WITHIN: Final = 5.0
QUOTED_LINES: Final = 8


class ReplicaEnded(Failed):
    """A worker process ended though nobody had killed it."""


@dataclass(slots=True)
class Kill:
    """One SIGKILL. at: seconds of the machine's monotonic clock. status: the exit status that the system then told."""

    at: float
    pid: int
    status: int | None = None


@dataclass(slots=True)
class Replicas:
    """The worker processes; `environment` has their settings."""

    environment: Mapping[str, str]
    log: Path
    kills: list[Kill] = field(default_factory=list)
    _alive: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def pids(self) -> list[int]:
        """The processes that nobody has killed yet."""
        return list(self._alive)

    def start(self) -> int:
        """Start one; returns its process id at once, before it has joined."""
        # In a session of its own: a Ctrl-C is for the demo, which then stops its workers.
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._alive[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> Kill:
        """SIGKILL: the process does not get to know, and can clean up nothing."""
        process = self._alive.pop(pid)
        os.kill(pid, signal.SIGKILL)
        kill = Kill(time.monotonic(), pid)
        self.kills.append(kill)
        kill.status = process.wait()
        _close(process)
        return kill

    def check(self) -> None:
        """Raise `ReplicaEnded` where a process has ended by itself, with what it said last."""
        for pid, process in self._alive.items():
            if process.poll() is not None:
                raise ReplicaEnded(
                    f"worker {pid} ended by itself with status {process.returncode}; the end of its log: {self._said()}"
                )

    async def stop(self) -> None:
        """Stop all: by the end of their input, and those that do not go by SIGKILL. Leaves no process behind."""
        for process in self._alive.values():
            _close(process)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._reap)

    def _reap(self) -> None:
        deadline = time.monotonic() + STOPPED_WITHIN
        for process in self._alive.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._alive.clear()

    def _said(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-QUOTED_LINES:]) or "(nothing)"


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
