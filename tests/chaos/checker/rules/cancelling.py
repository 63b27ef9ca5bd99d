"""Rule: a task is cancelled only on request, and does not run afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from ...journal import SECOND, Line
from ..history import History, Task, Violation

__all__ = ["check_cancelled"]


def check_cancelled(history: History) -> Iterator[Violation]:
    """Check the rule. A run that started before may continue on a worker that a fault kept from learning of it."""
    for task in history.tasks.values():
        told = [line for line in [*task.outcomes, task.final] if line is not None and line["state"] == "cancelled"]
        for line in told:
            if not (task.rules.dropped or _asked(history, task, line)):
                yield Violation("cancelled unasked", f"{task.id} is cancelled without a request", (line,))
        for answer in task.answers:
            if answer["state"] != "cancelled" or history.lost(answer.at, history.end):
                continue
            if task.final is not None and task.final["state"] != "cancelled":
                what = f"{task.id} was said to be cancelled, and is {task.final['state']}"
                yield Violation("finished twice", what, (answer, task.final))
            for run in task.runs:
                since = run.at - round(2 * history.lease * SECOND)
                if run.at > answer.at and history.faults.explain(run.pid, since, run.at) is None:
                    what = f"{task.id} was started after it had been cancelled"
                    yield Violation("finished twice", what, (answer, run.first))


def _asked(history: History, task: Task, told: Line) -> bool:
    """Return whether a task was to be cancelled: by a request, or with the attempt or the call of its parent."""
    if any(cancel.at < told.at for cancel in task.cancels):
        return True
    parent = history.tasks.get(task.parent or "")
    if parent is None:
        return False
    left = any(line.what == "abandons" and line["task"] == parent.id and line.at < told.at for line in history.lines)
    failed = any(run.failed and run.at < told.at for run in parent.runs)
    return left or failed or _asked(history, parent, told)
