"""Rule: tasks of one key are delivered for the first time in the order in which they were enqueued."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..history import History, Task, Violation

__all__ = ["check_order"]


def check_order(history: History) -> Iterator[Violation]:
    """Check the rule.

    One producer awaits each call, and a message keeps its entry until it is settled, so the entry of the first run
    decides. Later partitions have greater indexes. Tasks whose first message no run has seen are not checked.
    """
    by_key: dict[str, list[Task]] = {}
    for task in history.tasks.values():
        if task.enqueue is not None and task.enqueue.get("key") and task.runs:
            by_key.setdefault(task.enqueue["key"], []).append(task)
    for tasks in by_key.values():
        tasks.sort(key=lambda task: task.enqueue.at if task.enqueue else 0)
        for earlier, later in pairwise(tasks):
            if _place(earlier) > _place(later) and not _lost(history, earlier, later):
                what = f"{later.id} was put before {earlier.id}, which has the same key and was enqueued earlier"
                told = (earlier.enqueue, earlier.runs[0].first, later.enqueue, later.runs[0].first)
                yield Violation("out of order", what, tuple(line for line in told if line is not None))


def _lost(history: History, earlier: Task, later: Task) -> bool:
    """Return whether Redis has lost the earlier message, and with it the last id of the stream."""
    return history.lost(earlier.runs[0].at, later.runs[0].at)


def _place(task: Task) -> tuple[int, tuple[int, int]]:
    first = task.runs[0]
    return first.first["partition"], first.fence.entry
