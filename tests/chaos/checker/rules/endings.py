"""Rules: no acknowledged task is lost, and none is finished twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...journal import Line
from ..history import History, Run, Task, Violation

__all__ = ["check_lost", "check_once", "check_outcomes"]

_TERMINAL = ("succeeded", "dead", "cancelled")


def check_lost(history: History) -> Iterator[Violation]:
    """Check that every acknowledged task is in a terminal state after the last fault, when there was time."""
    for task in history.tasks.values():
        if task.acknowledged is None or history.forgot(task, history.end):
            continue
        if task.final is None:
            yield Violation("lost", f"{task.id} was acknowledged, and has no record", _lines(task))
        elif task.final["state"] not in _TERMINAL:
            what = f"{task.id} was acknowledged, and is {task.final['state']} though time was given"
            yield Violation("lost", what, _lines(task))


def check_once(history: History) -> Iterator[Violation]:
    """Check that a task has one outcome: all waiters get it, and nothing runs after it, except for a replay."""
    for task in history.tasks.values():
        yield from _one_outcome(history, task)
        yield from _none_after(history, task)


def _one_outcome(history: History, task: Task) -> Iterator[Violation]:
    told = [line for line in [*task.outcomes, task.final] if line is not None and line["state"] in _TERMINAL]
    told = [line for line in told if not history.lost(line.at, history.end)]
    for earlier, later in pairwise(told):
        same = earlier["state"] == later["state"] and earlier.get("result") == later.get("result")
        replayed = earlier["state"] == "dead" and history.replayed_between(0, later.at, task=task.id)
        if not same and not replayed:
            yield Violation("finished twice", f"{task.id} has two outcomes", (earlier, later))
    for line in task.outcomes:
        if line["state"] not in _TERMINAL and not history.forgot(task, line.at):
            yield Violation("lost", f"a waiter for {task.id} heard: {line.get('reason')}", (line,))


def _none_after(history: History, task: Task) -> Iterator[Violation]:
    """Check that no delivery comes after the one whose run returned the result."""
    final = task.final
    if final is None or final["state"] != "succeeded":
        return
    finisher = finisher_of(task)
    if finisher is None:
        yield Violation("finished twice", f"{task.id} succeeded with a result that no run returned", (final,))
        return
    for run in task.runs:
        if run.fence > finisher.fence and not history.lost(run.at, history.end):
            what = f"{task.id} was delivered again after the delivery that gave it its result"
            yield Violation("finished twice", what, (finisher.first, *_end(finisher), run.first, final))


def finisher_of(task: Task) -> Run | None:
    """Return the run whose result the task has: the last that returned it, on the worker that settled it."""
    assert task.final is not None
    found = [
        run
        for run in task.runs
        if run.end is not None and run.end.what == "returned" and run.end["result"] == task.final["result"]
    ]
    settled = [run for run in found if run.first["worker"] == task.final.get("worker")]
    return max(settled or found, key=lambda run: run.order, default=None)


def check_outcomes(history: History) -> Iterator[Violation]:
    """Check that the outcome of a task is one that its kind allows."""
    for task in history.tasks.values():
        final = task.final
        if final is None:
            continue
        if final["state"] == "succeeded" and not task.rules.succeeds:
            yield Violation("impossible outcome", f"{task.id} succeeded, which no {task.kind} can", (final,))
        if final["state"] == "dead" and final["reason"] not in task.rules.deaths:
            what = f"{task.id} is a dead letter ({final['reason']}), which nothing explains of a {task.kind}"
            yield Violation("unexplained dead letter", what, (*(run.first for run in task.runs), final))


def _end(run: Run) -> tuple[Line, ...]:
    return () if run.end is None else (run.end,)


def _lines(task: Task) -> tuple[Line, ...]:
    told = (task.enqueue, task.acknowledged, *(run.first for run in task.runs), *task.outcomes, task.final)
    return tuple(line for line in told if line is not None)
