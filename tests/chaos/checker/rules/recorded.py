"""Rule: a recorded step is not run again, and its record is not overwritten.

When a handler has been given the value of a step, the step counts as recorded from then on if

- its durability is `sync`; or
- it is `async`, and the same run was given the value of a later `sync` step (records are written in order); or
- the value was made by another run: then it came from the record.

No run of a later delivery starts a recorded step, nor does the same run; all get the recorded value; and the
checkpoint holds no other. A later delivery has a higher count: where Redis has lost a hand-out, two workers may have
the same. A run of an *earlier* delivery may start it only if a fault kept its worker from learning
that it had lost the lease: nothing outside Redis stops a process that was frozen before its first step. Its record is
refused.

A replay with --fresh deletes the records: the rule does not hold across it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ...journal import SECOND, Line
from ..history import History, Run, Task, Violation
from .endings import finisher_of

__all__ = ["check_recorded"]


class _Recorded(NamedTuple):
    """A value that a run was given, and that is certainly recorded. since: time from which it is."""

    run: Run
    value: Line
    since: int


def check_recorded(history: History) -> Iterator[Violation]:
    """Check the rule."""
    for task in history.tasks.values():
        for step in dict.fromkeys(line["step"] for run in task.runs for line in run.values):
            yield from _check_step(history, task, step)
        yield from _check_makers(task)
        yield from _check_checkpoint(task)


def _check_step(history: History, task: Task, step: str) -> Iterator[Violation]:
    records = [found for run in task.runs if (found := _recorded(run, step)) is not None]
    for record in records:
        for run in task.runs:
            yield from _check_begins(history, task, record, run, step)
            value = run.value(step)
            if value is None or value["token"] == record.value["token"] or run.order < record.run.order:
                continue
            if not _forgotten(history, record, run, value.at):
                what = f"{task.id}, step {step}: a later delivery was given another value than the recorded one"
                yield Violation("stale write", what, (record.value, run.first, value))
    for one, other in pairwise(records):
        older, newer = sorted((one, other), key=lambda record: record.run.order)
        both_made = older.value["token"] != newer.value["token"]
        if both_made and not _forgotten(history, older, newer.run, newer.value.at):
            what = f"{task.id}, step {step}: two deliveries had their own value recorded"
            yield Violation("stale write", what, (older.value, newer.run.first, newer.value))


def _recorded(run: Run, step: str) -> _Recorded | None:
    value = run.value(step)
    if value is None:
        return None
    if value["durability"] == "sync" or maker_of(value) != run.name:
        return _Recorded(run, value, value.at)
    later = next((one for one in run.values if one.at > value.at and one["durability"] == "sync"), None)
    return None if later is None else _Recorded(run, value, later.at)


def _check_begins(history: History, task: Task, record: _Recorded, run: Run, step: str) -> Iterator[Violation]:
    for begin in run.begins:
        if begin["step"] != step:
            continue
        shown = (record.run.first, record.value, run.first, begin)
        if run is record.run and begin.at > record.value.at:
            yield Violation("recorded step run again", f"{task.id}, step {step}: again in the same run", shown)
        elif run.fence > record.run.fence and not _forgotten(history, record, run, begin.at):
            yield Violation("recorded step run again", f"{task.id}, step {step}: by a later delivery", shown)
        elif run is not record.run and run.fence <= record.run.fence and begin.at > record.since:
            since = min(run.at, record.run.at) - round(history.lease * SECOND)
            if history.faults.explain(run.pid, since, begin.at) is None:
                what = f"{task.id}, step {step}: by an earlier delivery, whose worker no fault had hit"
                yield Violation("recorded step run again", what, shown)


def _forgotten(history: History, record: _Recorded, run: Run, at: int) -> bool:
    """Return whether the record does not bind the other run: Redis lost the record, or it lost the other delivery, so
    that the recorded one was the last again; or a replay with --fresh came in between, which deletes the record and
    gives the task another message.
    """
    if history.lost(record.since, at) or history.lost(run.at, record.value.at):
        return True
    return run.fence.entry != record.run.fence.entry and history.replayed_between(record.value.at, at, fresh=True)


def maker_of(value: Line) -> str:
    """Return the run that made a value: its token begins with it."""
    return str(value["token"]).partition("/")[0]


def _check_makers(task: Task) -> Iterator[Violation]:
    """Check that every value was made by an execution that ended."""
    made = {line["token"] for run in task.runs for line in run.effects}
    if task.ledger is not None:
        made.update(task.ledger["tokens"])
    for run in task.runs:
        for value in run.values:
            if value["token"] not in made:
                what = f"{task.id}, step {value['step']}: a value that no execution of the step has made"
                yield Violation("stale write", what, (run.first, value))


def _check_checkpoint(task: Task) -> Iterator[Violation]:
    """Check that the records on the server equal the values of the run that finished the task."""
    final = task.final
    if final is None or final["state"] != "succeeded":
        return
    finisher = finisher_of(task)
    if finisher is None:
        return
    for value in finisher.values:
        held = final["steps"].get(value["step"])
        if held != value["token"]:
            what = f"{task.id}, step {value['step']}: its record is {held}, the run that finished was given another"
            yield Violation("stale write", what, (finisher.first, value, final))
