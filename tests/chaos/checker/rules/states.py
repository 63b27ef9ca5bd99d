"""Rules for the observations: a task is in exactly one place, and its states follow docs/reference/task-states.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from ...journal import Line
from ..history import History, Violation

__all__ = ["check_states"]

_LIVE = frozenset({"queued", "scheduled", "running", "waiting", "limited", "succeeded", "dead", "cancelled"})

REACHABLE: Final[Mapping[str, frozenset[str]]] = {
    "queued": _LIVE,
    "scheduled": _LIVE,
    "running": _LIVE,
    "waiting": _LIVE,
    "limited": _LIVE,
    "succeeded": frozenset(),
    "cancelled": frozenset(),
    "dead": frozenset(),
}
"""States that may follow a state without a replay; states in between may be missed."""


def check_states(history: History) -> Iterator[Violation]:
    """Check the rule."""
    for line in history.lines:
        if line.what == "misplaced" and not _forgotten(history, line):
            yield Violation("not in one place", f"{line.get('task') or 'a task'}: {line['problem']}", (line,))
    for task in history.tasks.values():
        for earlier, later in pairwise(task.seen):
            if later["state"] in REACHABLE.get(earlier["state"], frozenset()):
                continue
            if history.lost(earlier["since"], later.at):
                continue
            if earlier["state"] == "nowhere" and _forgotten(history, earlier):  # it was stored again
                continue
            if earlier["state"] == "dead" and history.replayed_between(earlier["since"], later.at, task=task.id):
                continue
            what = f"{task.id} was {earlier['state']}, and then {later['state']}"
            yield Violation("impossible state", what, (earlier, later))
        for line in task.seen:
            if line["state"] not in _LIVE and not _forgotten(history, line):
                yield Violation("lost", f"{task.id} was seen {line['state']}", (line,))


def _forgotten(history: History, line: Line) -> bool:
    """Return whether Redis lost the task of a line before."""
    task = history.tasks.get(line.get("task") or "")
    return task is not None and history.forgot(task, line.at)
