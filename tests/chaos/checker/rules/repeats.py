"""Rule: effects are repeated only for steps in flight at a fault.

A step that starts again in another run was in flight when its run ended: by a fault that hit its process, by the
failure of the attempt, or before a replay. A fault counts until one lease after its end: by then a worker has learned
which leases it lost. `HARMLESS` faults explain nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...journal import SECOND, Line
from ..faults import Fault
from ..history import History, Run, Task, Violation

__all__ = ["check_charges", "check_repeats", "reason_of_repeat", "repeats"]


def check_repeats(history: History) -> Iterator[Violation]:
    """Check that each repeated start of a step has a reason."""
    for task in history.tasks.values():
        yield from _trials(task)
        for former, first, later, second in repeats(task):
            if reason_of_repeat(history, former, first, later, second) is None:
                what = f"{task.id}, step {second['step']}: started again, and no fault had cut it off"
                end = () if former.end is None else (former.end,)
                yield Violation("repeated without a fault", what, (former.first, first, *end, later.first, second))


def repeats(task: Task) -> Iterator[tuple[Run, Line, Run, Line]]:
    """Yield the starts of a step in another run than its last start, by time: both runs and both lines."""
    begins = sorted(((begin, run) for run in task.runs for begin in run.begins), key=lambda one: one[0].at)
    last: dict[str, tuple[Line, Run]] = {}
    for begin, run in begins:
        former = last.get(begin["step"])
        if former is not None and former[1] is not run:
            yield former[1], former[0], run, begin
        last[begin["step"]] = (begin, run)


def reason_of_repeat(history: History, former: Run, first: Line, later: Run, second: Line) -> str | None:
    """Return why the step was started again: a kind of fault, `attempt`, `replay`; None if nothing explains it."""
    if (
        former.fence >= later.fence
    ):  # the later beginning is that of a run that had lost its lease, or Redis lost a count
        fault = history.faults.explain(later.pid, later.at - round(history.lease * SECOND), second.at)
        if fault is not None:
            return f"stale after {fault.kind}"
        if former.fence > later.fence and not history.lost(former.at, second.at):
            return None
    fault = _cut_off(history, former, first, second)
    if fault is not None:
        return fault.kind
    if former.end is not None and former.end.at < second.at:
        if former.failed or later.first["attempt"] > former.first["attempt"]:
            return "attempt"
        task = former.first["task"]
        if former.fence.entry != later.fence.entry and history.replayed_between(former.end.at, second.at, task=task):
            return "replay"
    return None


def _cut_off(history: History, run: Run, first: Line, second: Line) -> Fault | None:
    return history.faults.explain(run.pid, first.at, second.at)


def _trials(task: Task) -> Iterator[Violation]:
    """Check that within one run a step is started again only by its own retry."""
    for run in task.runs:
        last: dict[str, Line] = {}
        for begin in run.begins:
            former = last.get(begin["step"])
            if former is not None and begin["trial"] != former["trial"] + 1:
                what = f"{task.id}, step {begin['step']}: started twice in one run"
                yield Violation("repeated without a fault", what, (run.first, former, begin))
            last[begin["step"]] = begin


def check_charges(history: History) -> Iterator[Violation]:
    """Check that a risky step with `verify` acts once.

    It may act twice only if the run that acted second had verified before the first one acted, which only a process
    without its lease can do.
    """
    for task in history.tasks.values():
        tokens = task.ledger["tokens"] if task.ledger is not None else []
        if len(tokens) < 2:
            continue
        effects = {line["token"]: (line, run) for run in task.runs for line in run.effects}
        for token in tokens[1:]:
            first, second = effects.get(tokens[0]), effects.get(token)
            if first is None or second is None:
                continue  # killed between the effect and its line
            stale = min(first[1], second[1], key=lambda run: run.order)
            since = stale.at - round(history.lease * SECOND)
            if history.faults.explain(stale.pid, since, max(first[0].at, second[0].at)) is None:
                what = f"{task.id}: charged twice, though the second run could have found out"
                yield Violation("charged twice", what, (first[1].first, first[0], second[1].first, second[0]))
