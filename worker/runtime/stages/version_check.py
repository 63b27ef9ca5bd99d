"""The version check: the stage that leaves a task of a newer data format to newer workers.

A mixed fleet has such tasks during a rolling deploy. They are parked until a worker that knows the format serves the
partition, and buried if none comes in time. A checkpoint that no version has written is buried at once.
"""

from __future__ import annotations

from functools import partial

from ....deadletter import Reason
from ....queues import DATA_FORMAT, NewerVersionNeeded, retry_while_unavailable
from ...log import log_wait
from ...settings import Settings
from ..outcome import AwaitVersion, Burial, Outcome
from .execution import Execution

__all__ = ["CheckVersion"]


class CheckVersion:
    """Stage: continue only with a task that this version can read."""

    def __init__(self, settings: Settings) -> None:
        self._wait = settings.version_wait

    async def __call__(self, execution: Execution) -> Outcome | None:
        run, history = execution.run, execution.run.history
        needed, since = max(run.envelope.requires, history.format), history.newer_since
        if needed > DATA_FORMAT:
            error = NewerVersionNeeded(run.id, needed, DATA_FORMAT)
            if since is not None and history.read_at - since >= self._wait * 1000:
                return Burial(Reason.NEWER_VERSION, history.counters, error)
            return AwaitVersion(needed, self._wait, history.counters, error)
        if history.problem is not None:
            return Burial(Reason.UNREADABLE, history.counters, history.problem)
        if since is not None:  # an older worker that gets the task later waits as long again
            record = run.delivery.partition.record(run.id)
            forget = partial(run.gateway.command, "HDEL", record, "newer_since")
            await retry_while_unavailable(forget, on_wait=log_wait(f"task {run.id}"))
        return None
