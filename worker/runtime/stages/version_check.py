"""The version checks: the stages that leave a task of a newer data format, or of newer code, to newer workers.

A mixed fleet has such tasks during a rolling deploy. They are parked until a worker that knows the format or has the
code serves the partition, and buried if none comes in time. A checkpoint that no version has written is buried at once.
"""

from __future__ import annotations

from functools import partial

from ....deadletter.policy import Reason
from ....queues.delivery.checkpoint import History
from ....queues.errors import NewerVersionNeeded, UnreadableCheckpoint
from ....queues.keys import DATA_FORMAT
from ....queues.transport.backoff import retry_while_unavailable
from ...journal.handoff.document import HANDOFF, RECEIVED
from ...journal.step_record import VERSION
from ...log import log_wait
from ...settings import Settings
from ..outcome import AwaitVersion, Burial, Outcome
from .execution import Execution


class CheckVersion:
    """Stage: continue only with a task that this version can read."""

    def __init__(self, settings: Settings) -> None:
        self._wait = settings.version_wait

    def __call__(self, execution: Execution) -> Outcome | None:
        run, history = execution.run, execution.run.history
        needed, since = max(run.envelope.requires, history.format), history.newer_since
        if needed > DATA_FORMAT:
            error = NewerVersionNeeded(run.id, needed, DATA_FORMAT)
            if since is not None and history.read_at - since >= self._wait * 1000:
                return Burial(Reason.NEWER_VERSION, history.counters, error)
            return AwaitVersion(needed, self._wait, history.counters, error)
        if history.problem is not None:
            return Burial(Reason.UNREADABLE, history.counters, history.problem)
        return None


class CheckTaskVersion:
    """Stage: set the version of the task's code that its first run began with, and continue if this worker has it."""

    def __init__(self, settings: Settings) -> None:
        self._wait = settings.version_wait

    async def __call__(self, execution: Execution) -> Outcome | None:
        run, task, history = execution.run, execution.task, execution.run.history
        since, known = history.newer_since, task.version
        try:
            version = _version_of(history, run.id)
        except UnreadableCheckpoint as problem:
            return Burial(Reason.UNREADABLE, history.counters, problem)
        if version is not None:
            run.set_version(version, new=False)
        if version is not None and version > known:
            error = NewerVersionNeeded(run.id, version, known, task.name)
            if since is not None and history.read_at - since >= self._wait * 1000:
                return Burial(Reason.NEWER_VERSION, history.counters, error)
            return AwaitVersion(version, self._wait, history.counters, error, task.name)
        if since is not None:  # an older worker that gets the task later waits as long again
            record = run.delivery.partition.record(run.id)
            forget = partial(run.gateway.command, "HDEL", record, "newer_since")
            await retry_while_unavailable(forget, on_wait=log_wait(f"task {run.id}"))
        return None


def _version_of(history: History, task_id: str) -> int | None:
    """Return the version of the code that recorded the first entry of the checkpoint; None if nothing is recorded.

    Documents for the next run do not count: they may be stored before the handler has recorded anything.
    """
    stored = history.saved.get(VERSION)
    if stored is not None:
        if not stored.isdigit():
            raise UnreadableCheckpoint(task_id, f"the version of the task must be a number, got {stored!r}")
        return int(stored)
    recorded = history.done or history.intents or history.pages is not None
    return 1 if recorded or history.saved.keys() - {RECEIVED, HANDOFF} else None
