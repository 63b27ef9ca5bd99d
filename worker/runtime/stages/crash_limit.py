"""Crash limit: the stage that buries or delays a task whose deliveries keep ending without an outcome.

Progress excuses crashes: as soon as the run stores a result or progress of a step that no earlier run had stored, they
no longer count in a row. They still count within a window, so a task that saves and crashes again and again is buried.
"""

from __future__ import annotations

import asyncio
from functools import partial

from ....deadletter import Reason, after_crash, backoff, must_quarantine
from ....queues import Gateway, LeaseLost, QueueError, excuse_crashes, last_step, retry_while_unavailable
from ...durable import Run, RunObserver, StopReason
from ...errors import CrashLoop
from ...log import log_wait, logger
from ..outcome import Burial, Outcome, Rerun
from .execution import Execution

__all__ = ["CrashLimit"]


class CrashLimit:
    """Stage: bury a task over its crash limit; delay one that has just crashed in quarantine."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._excusing: set[asyncio.Task[None]] = set()

    async def __call__(self, execution: Execution) -> Outcome | None:
        run, task = execution.run, execution.task
        history = run.history
        crashes = history.crashes_in_a_row
        if crashes < 1:
            return None
        if after_crash(task.retry, crashes, history.crashes_in_window) is not None:
            return Burial(Reason.CRASH_LOOP, history.counters, await self._error(execution))
        if history.lost and must_quarantine(crashes - 1, history.crashes_in_window - 1):
            delay = backoff(task.retry, crashes)
            return Rerun(delay, StopReason.CRASHED, history.counters, await self._error(execution))
        run.observe(_Progress(self, run))
        return None

    def excuse(self, run: Run) -> None:
        """Excuse the crashes of a run that made progress."""
        task = asyncio.get_running_loop().create_task(self._excuse(run))
        self._excusing.add(task)
        task.add_done_callback(self._excusing.discard)

    async def _excuse(self, run: Run) -> None:
        try:
            await excuse_crashes(self._gateway, run.delivery, run.id, run.history.counters.crashes)
        except LeaseLost:
            pass  # the run has ended, or its next write is refused
        except QueueError as error:
            logger.debug("could not excuse the crashes of task {}: {}", run.id, error)

    async def _error(self, execution: Execution) -> CrashLoop:
        """Describe the crashes: how the last worker exited, in which step, after which."""
        run = execution.run
        crash = run.history.crash
        last = await retry_while_unavailable(
            partial(last_step, self._gateway, run.delivery.partition, run.id), on_wait=log_wait(f"task {run.id}")
        )
        known = [str(crash.get("how", ""))]
        known += [f"in step {crash['step']!r}"] if "step" in crash else []
        known += [f"after step {last!r}"] if last is not None else ["before any step was recorded"]
        return CrashLoop(run.envelope.task, run.history.counters.crashes, " ".join(filter(None, known)))


class _Progress(RunObserver):
    """Excuses the crashes of a run at its first progress."""

    def __init__(self, limit: CrashLimit, run: Run) -> None:
        self._limit = limit
        self._run = run

    def on_recorded(self) -> None:
        self._run.unobserve(self)
        self._limit.excuse(self._run)
