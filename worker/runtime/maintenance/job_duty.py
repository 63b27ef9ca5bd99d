"""The duty of a worker to run jobs that no process runs: those of a command that has gone, or did not wait."""

from __future__ import annotations

from typing import Final

import anyio

from ....queues.errors import QueueError
from ....queues.jobs import JobStore
from ....queues.producer import Producer
from ...job_runner import JobRunner
from ...log import FirstOfEach, logger
from ...loop_errors import LoopErrors

_MAX_SLEEP: Final = 1.0
"""Longest sleep in seconds between two looks, while there are open jobs."""

_AT_ONCE: Final = 4
"""Jobs that a worker runs at once."""


class JobDuty:
    """Takes open jobs that have no runner, and runs them.

    All workers look. Which one gets a job is decided by the write of its lease.
    """

    def __init__(self, producer: Producer, worker: str) -> None:
        self._producer = producer
        self._worker = worker
        self._store = JobStore(producer.gateway, producer.namespace)
        self._running: set[str] = set()
        self._errors = LoopErrors("look for jobs")
        self._known = FirstOfEach()

    async def run(self) -> None:
        """Run jobs; return when no job is open."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    due, wait = await self._store.open_names()
                except QueueError as error:
                    self._errors.note(error)
                    due, wait = [], 1_000
                if wait is None and not self._running:
                    return
                for name in due:
                    if name not in self._running and len(self._running) < _AT_ONCE:
                        self._running.add(name)
                        tasks.start_soon(self._run, name)
                await anyio.sleep(_MAX_SLEEP if not wait else min(_MAX_SLEEP, wait / 1000))

    async def _run(self, name: str) -> None:
        runner = JobRunner(self._producer, self._worker)
        try:
            async for _ in runner.run(name):
                pass
            if runner.job is not None:
                counts = runner.job.counts
                logger.info(
                    "job {} is {}: {} done, {} skipped, {} failed",
                    *(name, runner.job.state, counts.done, counts.skipped, counts.failed),
                )
        except QueueError as error:
            if self._known.is_first(name, type(error).__name__, str(error)[:200]):
                logger.error("could not run job {}: {}", name, error)
        except Exception as error:  # noqa: BLE001 - the worker's other duties go on; the job has the problem
            self._errors.note(error, name)
        finally:
            self._running.discard(name)
