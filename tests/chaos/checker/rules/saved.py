"""Rule: what a step has saved is what the next run finds, or something newer."""

from __future__ import annotations

from collections.abc import Iterator

from ...journal import Line
from ..history import History, Run, Task, Violation

__all__ = ["check_saved"]


def check_saved(history: History) -> Iterator[Violation]:
    """Check that no run finds less than an earlier delivery had saved before.

    It may be deleted by a replay with --fresh, or lost by Redis.
    """
    for task in history.tasks.values():
        for run in task.runs:
            for found in run.progress:
                if found.what == "found" and (earlier := _missing(history, task, run, found)) is not None:
                    what = f"{task.id}, step {found['step']}: {earlier['pieces']} were saved, {found['pieces']} found"
                    yield Violation("saved progress lost", what, (earlier, run.first, found))


def _missing(history: History, task: Task, run: Run, found: Line) -> Line | None:
    """Return a line that says that more had been saved by an earlier delivery, or by this one."""
    for other in task.runs:
        if other.order > run.order:
            continue
        for saved in other.progress:
            older = saved.what == "saved" and saved["step"] == found["step"] and saved.at < found.at
            if older and saved["pieces"] > found["pieces"] and not _deleted(history, other, saved, run, found):
                return saved
    return None


def _deleted(history: History, other: Run, saved: Line, run: Run, found: Line) -> bool:
    if history.lost(saved.at, found.at):
        return True
    return other.fence.entry != run.fence.entry and history.replayed_between(saved.at, found.at, fresh=True)
