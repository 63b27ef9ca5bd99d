"""Rule: a worker that starts after settings were stored uses them, whatever its own are.

Its result TTL is seen in the records of the tasks that it settles. A worker that used a shorter lease of its own would
claim tasks from workers that are alive, which the rules of `repeats` find: no fault explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...journal import SECOND
from ..history import History, Run, Task, Violation
from .endings import finisher_of

__all__ = ["check_settings"]

_TOLERANCE: Final = 1.0
"""Seconds by which the two ends of a retention may be rounded."""

_STANDSTILLS: Final = frozenset({"redis_freeze", "slow server"})
"""Redis may stand still within the script of an outcome: after it has read the time, and before it sets the TTL."""


def check_settings(history: History) -> Iterator[Violation]:
    """Check the retention of each result whose worker started after a result TTL had been stored."""
    stored = [line for line in history.lines if line.what == "stored"]
    started = {line.pid: line for line in history.lines if line.what == "process" and line["version"] == "this"}
    for task in history.tasks.values():
        final = task.final
        finisher = finisher_of(task) if final is not None and final["state"] == "succeeded" else None
        process = None if finisher is None else started.get(finisher.pid)
        if final is None or finisher is None or process is None:
            continue
        known = next((line for line in reversed(stored) if line.at < process.at), None)
        if known is None:
            continue
        longer = final["kept"] - known["result_ttl"]
        if not -_TOLERANCE <= longer <= _TOLERANCE + _standstill(history, task, finisher):
            what = f"{task.id}: kept for {final['kept']:g} s, and {known['result_ttl']:g} s had been stored"
            yield Violation("stored setting ignored", what, (known, process, finisher.first, final))


def _standstill(history: History, task: Task, finisher: Run) -> float:
    """Return the longest time in seconds that Redis stood still before a waiter had the outcome of a run."""
    ends = min((line.at for line in task.outcomes if line.at > finisher.at), default=history.end)
    times = [
        fault.until - fault.begin.at
        for fault in history.faults.all
        if fault.kind in _STANDSTILLS and fault.until >= finisher.at and fault.begin.at <= ends
    ]
    return max(times, default=0) / SECOND
