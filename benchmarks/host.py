"""A host as a deployment has it: a supervisor with its workers. They tell when they began something."""

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

from .place import Place
from .processes import ROOT, Child

__all__ = ["WORKERS", "Host", "host"]

WORKERS = 2
"""Ordinary ones; an isolated one waits besides."""

_READY_WITHIN = 180.0


class Host:
    """Seen from outside. Workers are told apart from those of other hosts by the name of the host."""

    def __init__(self, name: str, producer: Producer, supervisor: Child) -> None:
        self._name = name
        self._producer = producer
        self._supervisor = supervisor

    async def workers(self) -> Sequence[WorkerInfo]:
        """Those that have announced themselves."""
        found = await list_workers(self._producer.gateway, self._producer.namespace)
        return [worker for worker in found if worker.id.startswith(f"{self._name}-") and _lives(worker.pid)]

    async def complete(self) -> None:
        """Wait until all of its workers are there."""
        async with asyncio.timeout(_READY_WITHIN):
            while len(await self.workers()) <= WORKERS:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.05)

    async def told(self, within: float) -> float:
        """The next time that one of its workers tells."""
        return await self._supervisor.told(within)

    async def kill_who_runs(self, task: TaskHandle[Any]) -> float:
        """SIGKILL to the worker that runs a task; returns when that was."""
        record = await task.record()
        (pid,) = [worker.pid for worker in await self.workers() if worker.id == record.worker]
        now = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return now

    async def lose(self) -> float:
        """SIGKILL to all processes at once, the supervisor first, so that nobody sees it."""
        pids = [self._supervisor.pid, *(worker.pid for worker in await self.workers())]
        now = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return now

    def stop(self) -> float:
        """SIGTERM to the supervisor; returns when that was."""
        return self._supervisor.send(signal.SIGTERM)


@asynccontextmanager
async def host(name: str, place: Place, producer: Producer) -> AsyncIterator[Host]:
    """A host that is complete on entry, and gone on exit."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.worker.cli", "worker", "run", "benchmarks.replica:app"),
        *("--processes", str(WORKERS), "--name", name),
        stdout=PIPE,
        cwd=ROOT,
        env={**place.environment, "PERDURE_LOG_LEVEL": "ERROR", **_KEEP_ON},
    )
    found = Host(name, producer, Child(process))
    try:
        await found.complete()
        yield found
    finally:
        await found.lose()
        await process.wait()


_KEEP_ON = {"PERDURE_CRASH_THRESHOLD": "1000000", "PERDURE_RESTART_DELAYS": "0.1"}
"""A supervisor whose workers are killed again and again, as none is in real life, would pause."""


def _lives(pid: int) -> bool:
    """Whether a worker that announced itself is still there; it may have been killed since."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
