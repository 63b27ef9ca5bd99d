"""Crash limit: the stage that buries or delays a task whose deliveries keep ending without an outcome."""

from __future__ import annotations

from functools import partial

from ....deadletter import Reason, after_crash, backoff
from ....queues import Gateway, last_step, retry_while_unavailable
from ...durable import StopReason
from ...errors import CrashLoop
from ...log import log_wait
from ..outcome import Burial, Outcome, Rerun
from .execution import Execution

__all__ = ["CrashLimit"]


class CrashLimit:
    """Stage: bury a task over its crash limit; delay one that just crashed, and not for the first time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, execution: Execution) -> Outcome | None:
        run, task = execution.run, execution.task
        counters, crashes = run.history.counters, run.history.counted_crashes
        if after_crash(task.retry, counters._replace(crashes=crashes)) is not None:
            return Burial(Reason.CRASH_LOOP, counters, await self._error(execution))
        if crashes > 1 and run.history.lost:
            delay = backoff(task.retry, crashes - 1)
            return Rerun(delay, StopReason.CRASHED, counters, await self._error(execution), suspect=True)
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
