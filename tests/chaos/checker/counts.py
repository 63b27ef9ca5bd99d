"""Counts of a run: tasks by kind and outcome, steps, faults, repeats, recoveries."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from ..journal import SECOND
from .faults import DEADLY, SYMPTOMS
from .history import History, Run
from .rules.repeats import reason_of_repeat, repeats
from .rules.schedules import fired
from .samples import sampled

__all__ = ["counted"]

_WITHOUT_REDIS: Final = frozenset({"redis_kill", "redis_stop", "redis_freeze", "newcomer", "failover"})


def counted(history: History) -> Iterator[str]:
    """Yield the counts, line by line."""
    yield from _tasks(history)
    yield from _steps(history)
    yield from _waits(history)
    yield from _schedules(history)
    yield from _faults(history)
    yield from _repeats(history)
    yield from _recoveries(history)
    yield from sampled(history)


def _tasks(history: History) -> Iterator[str]:
    tasks = history.tasks.values()
    acknowledged = sum(task.acknowledged is not None for task in tasks)
    yield f"tasks: {acknowledged} acknowledged, {len(tasks)} known, {sum(len(task.runs) for task in tasks)} runs"
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for task in tasks:
        if task.final is not None:
            reason = task.final.get("reason")
            state = task.final["state"]
            by_kind[task.kind][f"{state} ({reason})" if state == "dead" else state] += 1
    for kind, states in sorted(by_kind.items()):
        yield f"  {kind:10} {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    replays = sum(task.final["replays"] for task in tasks if task.final is not None)
    versions = Counter(line["version"] for line in history.lines if line.what == "process" and line["role"] == "worker")
    processes = ", ".join(f"{number} of {name} version" for name, number in versions.items())
    former = next((line["former"] for line in history.lines if line.what == "versions"), None)
    yield f"replayed: {replays}; worker processes: {processes}{f' ({former[:12]})' if former else ''}"


def _steps(history: History) -> Iterator[str]:
    runs = [run for task in history.tasks.values() for run in task.runs]
    started, done = sum(len(run.begins) for run in runs), sum(len(run.effects) for run in runs)
    given = sum(len(run.values) for run in runs)
    again = sum(value["token"].partition("/")[0] != run.name for run in runs for value in run.values)
    yield f"steps: {started} started, {done} ended, {given} values returned, {again} of them from the record"


def _waits(history: History) -> Iterator[str]:
    tasks = history.tasks.values()
    replies = Counter(what for _, what in {(line["nonce"], line.what) for task in tasks for line in task.replies})
    taken = {(task.id, line["wait"]) for task in tasks for line in task.used if line["nonce"] is not None}
    yield f"answers: {replies['answered']} stored, {replies['refused']} refused, {len(taken)} used"
    spots = {line["spot"] for task in tasks for line in task.births}
    children = sum(bool(task.births) for task in tasks)
    joined = {(line["task"], line["spot"]) for task in tasks for line in task.joined}
    shown = Counter("loaded again" if line["patience"] else "followed" for task in tasks for line in task.shown)
    items = sum(len(line["entries"]) for task in tasks for line in task.streams)
    yield f"streams: {items} items stored; pages: {shown['followed']} followed, {shown['loaded again']} loaded again"
    yield f"children: {children} have run, for {len(spots)} spots; {len(joined)} results joined"


def _schedules(history: History) -> Iterator[str]:
    found = Counter(name for name, _ in fired(history))
    yield f"schedules: {', '.join(f'{count} {name}' for name, count in found.items()) or 'none'}"


def _faults(history: History) -> Iterator[str]:
    kinds = Counter(fault.kind for fault in history.faults.all if fault.kind != "exit")
    yield f"faults: {kinds.total()}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"


def _repeats(history: History) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for task in history.tasks.values():
        for former, first, later, second in repeats(task):
            reasons[reason_of_repeat(history, former, first, later, second) or "VIOLATING"] += 1
    shown = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    yield f"steps started again: {reasons.total()}{f': {shown}' if shown else ''}; violating: {reasons['VIOLATING']}"


def _recoveries(history: History) -> Iterator[str]:
    """Count recoveries: the time from a fault to the next run, without the time without Redis."""
    found: dict[str, list[float]] = defaultdict(list)
    for task in history.tasks.values():
        for run, following in pairwise(task.runs):
            recovery = _recovery(history, run, following)
            if recovery is not None:
                found[recovery[0]].append(recovery[1])
    everything = [seconds for times in found.values() for seconds in times]
    if not everything:
        yield "recoveries: none"
        return
    yield f"recoveries: {len(everything)}, the longest {max(everything):.2f} s"
    yield "  (from the fault to the task running again, without the time without Redis; seen: by a supervisor)"
    for kind, times in sorted(found.items(), key=lambda one: -max(one[1])):
        yield f"  {kind:14} {len(times):5} times, median {statistics.median(times):6.2f} s, longest {max(times):6.2f} s"


def _recovery(history: History, run: Run, following: Run) -> tuple[str, float] | None:
    """Return the kind of the fault that ended a run, and the seconds from the fault to the next run; None for no fault.

    If there were several, it is the one that killed the process, else the first.
    """
    if following.fence.entry != run.fence.entry:  # an outcome would have taken the message away
        return None
    faults = [
        fault
        for fault in history.faults.hitting(run.pid, run.at, following.at)
        if fault.kind not in SYMPTOMS and fault.begin.at >= run.at
    ]
    if not faults:
        return None
    first = min(faults, key=lambda fault: (fault.kind not in DEADLY, fault.begin.at))
    seen = first.kind in ("kill", "poison") and history.faults.supervised(run.pid)
    return f"{first.kind}, seen" if seen else first.kind, (
        following.at - first.begin.at - _away(history, first.begin.at, following.at)
    ) / SECOND


def _away(history: History, since: int, until: int) -> int:
    """For how much of a time Redis was away."""
    away, reached = 0, since
    for fault in history.faults.all:  # by their beginnings
        if fault.kind in _WITHOUT_REDIS:
            begin, end = max(reached, fault.begin.at), min(fault.until, until)
            away += max(0, end - begin)
            reached = max(reached, end)
    return away
