"""A simulated host: a supervisor with workers that report when they start something."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from perdure import Producer, TaskHandle
from perdure.queues import WorkerInfo, list_workers

from .deployment import Deployment
from .processes import ROOT, Child

__all__ = ["WORKERS", "Host", "host"]

WORKERS = 2
"""Workers of a host."""

_READY_WITHIN = 180.0


class Host:
    """A supervisor and its workers, seen from outside. Worker ids start with the name of the host."""

    def __init__(self, name: str, producer: Producer, supervisor: Child) -> None:
        self._name = name
        self._producer = producer
        self._supervisor = supervisor

    async def workers(self) -> Sequence[WorkerInfo]:
        """Return the registered workers."""
        found = await list_workers(self._producer.gateway, self._producer.namespace)
        return [worker for worker in found if worker.id.startswith(f"{self._name}-") and _lives(worker.pid)]

    async def complete(self) -> None:
        """Wait until all of its workers are registered."""
        async with asyncio.timeout(_READY_WITHIN):
            while len(await self.workers()) < WORKERS:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)

    async def reported(self, within: float) -> float:
        """Return the next time that one of its workers reports."""
        return await self._supervisor.reported(within)

    async def kill_worker_of(self, task: TaskHandle[Any]) -> float:
        """Send SIGKILL to the worker that runs a task; return when."""
        record = await task.record()
        (pid,) = [worker.pid for worker in await self.workers() if worker.id == record.worker]
        now = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return now

    async def lose(self) -> float:
        """Send SIGKILL to all processes, the supervisor first, so that no process reports the crash; return when."""
        pids = [self._supervisor.pid, *(worker.pid for worker in await self.workers())]
        now = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return now

    def stop(self) -> float:
        """Send SIGTERM to the supervisor; return when."""
        return self._supervisor.send(signal.SIGTERM)


@asynccontextmanager
async def host(name: str, deployment: Deployment, producer: Producer) -> AsyncIterator[Host]:
    """Start a host; all its workers are registered on entry and gone on exit."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.worker.cli", "worker", "run", "benchmarks.support.worker_process:app"),
        *("--processes", str(WORKERS), "--name", name),
        stdout=PIPE,
        cwd=ROOT,
        env={**deployment.environment, "PERDURE_LOG_LEVEL": "ERROR", **_NO_PAUSE},
    )
    found = Host(name, producer, Child(process))
    try:
        await found.complete()
        yield found
    finally:
        await found.lose()
        await process.wait()


_NO_PAUSE = {"PERDURE_CRASH_THRESHOLD": "1000000", "PERDURE_RESTART_DELAYS": "0.1"}
"""The supervisor must not pause although its workers are killed repeatedly."""


def _lives(pid: int) -> bool:
    """Return whether the process of a registered worker still exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
