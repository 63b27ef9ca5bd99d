"""Crash limit: the stage that buries or delays a task whose deliveries keep ending without an outcome.

Progress excuses crashes: the write that stores a result or progress of a step that no earlier run had stored ends
their count in a row (see `History.excuse`). They still count within a window, so a task that saves and crashes again
and again is buried.
"""

from __future__ import annotations

from functools import partial

from ....deadletter.policy import Reason, after_crash, backoff, must_quarantine
from ....queues.delivery.checkpoint import last_step
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.gateway import Gateway
from ...durable.stop_reasons import StopReason
from ...errors import CrashLoop
from ...log import log_wait
from ..outcome import Burial, Outcome, Rerun
from .execution import Execution


class CrashLimit:
    """Stage: bury a task over its crash limit; delay one that has just crashed in quarantine."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

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
        return None

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
