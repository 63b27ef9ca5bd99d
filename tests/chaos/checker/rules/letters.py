"""Every dead letter is explained: its reason and its counters agree with what the journal knows.

The journal knows runs, not deliveries: one whose worker died before the handler started left no line. So counters are
checked against bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...journal import Line
from ..faults import HARMLESS
from ..history import History, Run, Task, Violation

__all__ = ["check_letters"]


def check_letters(history: History) -> Iterator[Violation]:
    """Check the tasks that are dead at the end. `check_outcomes` checks whether the reason is possible at all."""
    for task in history.tasks.values():
        final = task.final
        if final is None or final["state"] != "dead" or final["reason"] not in task.rules.deaths:
            continue
        problem = _CHECKS[final["reason"]](history, task, final)
        if problem:
            ends = tuple(line for run in task.runs for line in (run.first, run.end) if line is not None)
            what = f"{task.id} is a dead letter ({final['reason']}), and {problem}"
            yield Violation("unexplained dead letter", what, (*ends, final))


def _last_life(history: History, task: Task) -> list[Run]:
    """Return the runs since the last replay, which set the counters to zero."""
    life: list[Run] = []
    for run in task.runs:
        fresh = run.first["attempt"] == 1 and run.first["crashes"] == 0
        another = bool(life) and run.fence.entry != life[-1].fence.entry
        if fresh and another and history.replayed_between(life[-1].at, run.at, task=task.id):
            life = []
        life.append(run)
    return life


def _attempts_exhausted(history: History, task: Task, final: Line) -> str | None:
    failed = [run for run in task.runs if run.failed]
    if final["attempts"] != task.rules.attempts:
        return f"had {final['attempts']} attempts of {task.rules.attempts}"
    if len(failed) < final["attempts"]:
        return f"failed {len(failed)} times, its record says {final['attempts']}"
    return None


def _timeout(history: History, task: Task, final: Line) -> str | None:
    cut = [run for run in task.runs if run.end is not None and run.end.what == "left"]
    if final["attempts"] != task.rules.attempts:
        return f"had {final['attempts']} attempts of {task.rules.attempts}"
    if len(cut) < final["attempts"]:
        return f"ran out of time {len(cut)} times, its record says {final['attempts']}"
    return None


def _crash_loop(history: History, task: Task, final: Line) -> str | None:
    allowed = task.rules.crashes
    if final["crashes"] <= allowed:
        return f"had {final['crashes']} crashes, of which it survives {allowed}"
    unfinished = [run for run in task.runs if run.end is None or not run.failed]
    earliest = task.runs[0].at if task.runs else (task.acknowledged or final).at
    faults = [one for one in history.faults.all if one.kind not in HARMLESS and one.begin.at >= earliest - _MINUTE]
    if final["crashes"] > len(unfinished) + len(faults):
        return f"its record says {final['crashes']} crashes; {len(unfinished)} runs and {len(faults)} faults are known"
    if not unfinished and not faults:
        return "no run of it was cut off"
    if task.kind == "poison":
        return _poison(history, task, final)
    return None


_MINUTE: Final = 60_000_000_000


def _poison(history: History, task: Task, final: Line) -> str | None:
    """Check that it has killed one process more than its limit, and was not only hit by the deaths of others."""
    kills = [run for run in _last_life(history, task) if run.began("suicide")]
    most = task.rules.crashes + 2 + len(history.losses)  # a kill may come before the first step is recorded, or be lost
    if len(kills) > most:
        return f"it has killed {len(kills)} processes, one more than {task.rules.crashes} is its limit"
    if not any(run.began("suicide") for run in task.runs) and final["crashes"] > len(history.faults.all):
        return "it never killed"
    return None


def _in_doubt(history: History, task: Task, final: Line) -> str | None:
    """Check that a fault hit a run in the step, or between its intent and its first line."""
    for run in task.runs:
        reached = run.value("order") is not None and run.value("charge") is None
        if reached and history.faults.explain(run.pid, run.at, final.at) is not None:
            return None
    return "no run of it was cut off in its risky step"


_CHECKS: Final[dict[str, Callable[[History, Task, Line], str | None]]] = {
    "attempts_exhausted": _attempts_exhausted,
    "timeout": _timeout,
    "crash_loop": _crash_loop,
    "in_doubt": _in_doubt,
}
