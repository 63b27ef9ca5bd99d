"""Rules of children: none is lost, none is doubled, and each result is that of its spot.

A spot is the id of the parent and the place of the child in it. A spot has one child, and another one for each attempt
of the parent that has failed. A parent that enqueues a task by itself and awaits it may do so again in each run: code
outside of steps runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...journal import Line
from ..history import History, Task, Violation
from .endings import finisher_of

__all__ = ["check_children"]

_ENDED = ("succeeded", "dead", "cancelled")


def check_children(history: History) -> Iterator[Violation]:
    """Check the rules."""
    spots: dict[str, list[Task]] = {}
    for task in history.tasks.values():
        for spot in {line["spot"] for line in task.births}:
            spots.setdefault(spot, []).append(task)
        yield from _check_ended(history, task)
    for spot, children in spots.items():
        yield from _check_doubled(history, spot, children)
    for task in history.tasks.values():
        for line in task.joined:
            yield from _check_joined(line, spots.get(line["spot"], []))
        yield from _check_same(history, task)
        yield from _check_outcomes(history, task, spots)


def _check_ended(history: History, task: Task) -> Iterator[Violation]:
    """Check that a child has ended. Those that were acknowledged are checked as all tasks are."""
    if task.acknowledged is not None or (not task.births and (task.final is None or task.parent is None)):
        return
    if task.final is None:
        if not history.lost(task.births[0].at, history.end):
            yield Violation("lost", f"child {task.id} has run, and has no record", _lines(task))
    elif task.final["state"] not in _ENDED:
        what = f"child {task.id} is {task.final['state']} though time was given"
        yield Violation("lost", what, (*_lines(task), task.final))


def _check_doubled(history: History, spot: str, children: list[Task]) -> Iterator[Violation]:
    parent = history.tasks.get(spot.rpartition("/")[0])
    children.sort(key=lambda task: task.births[0].at)
    failed = 0 if parent is None else sum(run.failed for run in parent.runs)
    lost = sum(history.lost(earlier.births[0].at, later.births[0].at) for earlier, later in pairwise(children))
    again = len(parent.runs) if parent is not None and parent.kind == "awaits" else 1 + failed
    if len(children) > again + lost:
        what = f"spot {spot} has {len(children)} children, and {failed} attempts of its parent have failed"
        yield Violation("child doubled", what, tuple(line for child in children for line in _lines(child)[:3]))


def _check_joined(line: Line, children: list[Task]) -> Iterator[Violation]:
    """Check that a result is that of the child, which some execution of it has made."""
    grown = line["grown"]
    made = {effect["token"] for child in children for run in child.runs for effect in run.effects}
    if grown["spot"] != line["spot"] or grown["token"] not in made:
        what = f"{line['task']}: the result for {line['spot']} is {grown}, which no child of this spot has made"
        births = [birth for child in children for birth in child.births]
        yield Violation("result of another child", what, (line, *births))


def _check_same(history: History, task: Task) -> Iterator[Violation]:
    """Check that all runs are given the same results, up to the failure of an attempt."""
    last: dict[str, Line] = {}
    failed = [run.end.at for run in task.runs if run.failed and run.end is not None]
    for line in task.joined:
        former = last.get(line["spot"])
        last[line["spot"]] = line
        if former is None or former["grown"] == line["grown"] or history.lost(former.at, line.at):
            continue
        if not any(former.at < at < line.at for at in failed):
            what = f"{task.id}: {line['spot']} had one result, and another one in a later run"
            yield Violation("result changed", what, (former, line))


def _check_outcomes(history: History, task: Task, spots: dict[str, list[Task]]) -> Iterator[Violation]:
    """Check that the children whose results a parent returned have succeeded with them.

    Redis may have lost the outcome of a child, which then ran again, while the notice of it was on its way.
    """
    if task.final is None or task.final["state"] != "succeeded" or (finisher := finisher_of(task)) is None:
        return
    for line in task.joined:
        if line["run"] != finisher.name:
            continue
        children = spots.get(line["spot"], [])
        ends = [child.final for child in children if child.final is not None]
        made = [
            run.end for child in children for run in child.runs if run.end and run.end.get("result") == line["grown"]
        ]
        found = any(end["state"] == "succeeded" and end["result"] == line["grown"] for end in ends)
        lost = history.lost(line.at, history.end) or any(history.lost(end.at, history.end) for end in made)
        if not found and not lost:
            what = f"{task.id} has the result of {line['spot']}, and no child of it has succeeded with that"
            yield Violation("result of another child", what, (line, *ends))


def _lines(task: Task) -> tuple[Line, ...]:
    ends = [run.end for run in task.runs if run.end is not None]
    return (*task.births, *ends)
