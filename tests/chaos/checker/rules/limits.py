"""Rules of limits: no more run at once than a limit allows, nor start faster, nor before their turn; nothing is left.

The times of the journal are those of one clock, so what runs at once is known. A process that a fault has hit may run
on until it notices that its token has lapsed. Rates are compared with Redis' clock: a start was charged between the
entry of its message and its first line, or up to some time before, if a fault may have delayed the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final, NamedTuple

from ...journal import SECOND, Line
from ...kinds import BOUNDS
from ..history import History, Run, Task, Violation

__all__ = ["check_limits"]

_CHARGED_BEFORE: Final = 0.1
"""Seconds between a charge and the message of its task, on a busy machine."""

_TOKEN_LIFE: Final = 30.0
"""Seconds for which a process that took a token may wait before it admits the task."""

_PROMPT: Final = frozenset(
    {
        "kill",
        "kill_host",
        "kill_supervisor",
        "kill_all",
        "kill_producer",
        "replay",
        "resume",
        "exit",
        "poison",
        "settings",
        "plan",
    }
)
"""Faults that delay nothing: what they hit does nothing more, or is not concerned."""

_ORDERED: Final = frozenset({"lines", "halts"})
_ENDED: Final = ("succeeded", "dead", "cancelled")


class _Hold(NamedTuple):
    """Code that ran in a limit. since, until: of the journal. began, ended: by Redis' clock, if it replied."""

    task: Task
    run: Run
    first: Line
    since: int
    until: int
    began: float | None
    ended: float | None

    @property
    def limit(self) -> str:
        name: str = self.first["limit"]
        return name

    @property
    def key(self) -> str:
        key: str = self.first["key"]
        return key


class _Charge(NamedTuple):
    """What was charged between two times of Redis' clock."""

    since: float
    until: float
    cost: int
    line: Line


def check_limits(history: History) -> Iterator[Violation]:
    """Check the rules."""
    holds = sorted(_holds(history), key=lambda hold: hold.since)
    for limit in BOUNDS:
        mine = [hold for hold in holds if hold.limit == limit]
        yield from _check_overlap(history, mine)
        if BOUNDS[limit].every:
            yield from _check_rate(history, limit, mine)
    yield from _check_kept(history, [hold for hold in holds if hold.limit == "seat"])
    yield from _check_order(history)
    for line in history.lines:
        if line.what == "left_over":
            yield Violation("leak", f"after {line['seconds']:.0f} s there are left: {line['found']}", (line,))


def _holds(history: History) -> Iterator[_Hold]:
    for task in history.tasks.values():
        runs = {run.name: run for run in task.runs}
        for first in task.holds:
            if first.what != "holds":
                continue
            same = [line for line in task.holds if all(line[of] == first[of] for of in ("run", "limit", "key", "step"))]
            freed = next((line.at for line in same if line.what == "frees"), None)
            told = [line.get("clock") for line in same if line.what == "held"]
            run = runs[first["run"]]
            ended = told[1] if len(told) > 1 else None
            yield _Hold(task, run, first, first.at, freed or _last(run, same), told[0] if told else None, ended)


def _last(run: Run, lines: Sequence[Line]) -> int:
    """Return when a run that was killed was seen for the last time."""
    return max(line.at for line in (run.first, *run.begins, *run.values, *run.effects, *lines))


def _check_overlap(history: History, holds: Sequence[_Hold]) -> Iterator[Violation]:
    """Check how many run at once, of all keys and of one."""
    active: list[_Hold] = []
    for hold in holds:
        active = [former for former in active if former.until > hold.since]
        active.append(hold)
        bound, same = BOUNDS[hold.limit], [each for each in active if each.key == hold.key]
        for most, found in ((bound.total, active), (bound.running, same)):
            if most is not None and len(found) > most and not _is_doubtful(history, found, hold.since):
                what = f"limit {hold.limit} {hold.key!r} allows {most}, and {len(found)} run at once"
                yield Violation("above the limit", what, tuple(each.first for each in found))


def _is_doubtful(history: History, holds: Sequence[_Hold], now: int) -> bool:
    """Return whether a process may have lost its token and not noticed, or Redis may have lost that it was taken."""
    slack = round(2 * history.lease * SECOND)
    if any(loss.begin.at <= now <= loss.until + slack for loss in history.losses):
        return True
    return any(history.faults.explain(hold.first.pid, now - slack, now) is not None for hold in holds)


def _check_kept(history: History, holds: Sequence[_Hold]) -> Iterator[Violation]:
    """Check that a parked task that keeps its token is alone until it has ended."""
    spans: dict[str, list[_Hold]] = defaultdict(list)
    for hold in holds:
        spans[hold.task.id].append(hold)
    for one, other in combinations(spans.values(), 2):
        earlier, later = sorted((one, other), key=lambda each: each[0].since)
        if earlier[0].key != later[0].key or later[0].since > earlier[-1].until or len(earlier) < 2:
            continue
        since, until = earlier[0].since, later[0].since
        killed = any(fault.kind == "kill_all" and since <= fault.begin.at <= until for fault in history.faults.all)
        replayed = any(task.final is not None and task.final["replays"] for task in (earlier[0].task, later[0].task))
        if not (killed or replayed or any(_is_doubtful(history, [hold], until) for hold in earlier)):
            what = f"{later[0].task.id} ran in the seat of {earlier[0].task.id}, which keeps it"
            yield Violation("above the limit", what, (*(hold.first for hold in earlier), later[0].first))


def _check_rate(history: History, limit: str, holds: Sequence[_Hold]) -> Iterator[Violation]:
    bound, parts = BOUNDS[limit], defaultdict[int, list[_Charge]](list)
    admitted: set[tuple[str, object]] = set()
    for hold in holds:
        charge = _charge(history, hold)
        if hold.first["step"] or (hold.task.id, hold.run.fence.entry) not in admitted:
            admitted.add((hold.task.id, hold.run.fence.entry))  # one that is delivered again is not charged again
            if charge is not None:
                parts[_part(history, hold.since)].append(charge)
    for charges in parts.values():
        charges.sort(key=lambda charge: charge.until)
        for first in charges:
            used, seen = 0, list[Line]()
            for charge in charges:
                if charge.since >= first.since:
                    used, seen = used + charge.cost, [*seen, charge.line]
                    width = charge.until - first.since
                    if used > bound.burst + width / bound.every + 0.01:
                        what = f"{used} of limit {limit} within {width:.3f} s"
                        yield Violation("above the rate", what, tuple(seen))
                        return


def _charge(history: History, hold: _Hold) -> _Charge | None:
    """Return when a start was charged, if that is known."""
    ended = hold.ended if hold.first["step"] else hold.began
    if hold.began is None or ended is None:
        return None
    admitted = hold.began if hold.first["step"] else min(hold.began, hold.run.fence.entry[0] / 1000)
    before = round(10 * SECOND)
    slow = any(
        fault.kind not in _PROMPT and fault.begin.at <= hold.until and fault.until >= hold.since - before
        for fault in history.faults.all
    )
    slack = _TOKEN_LIFE if slow else _CHARGED_BEFORE
    after = slack if hold.first["step"] else 0.0  # its cost is corrected at the end
    return _Charge(admitted - slack, ended + after, hold.first["used"], hold.first)


def _part(history: History, at: int) -> int:
    """Return the number of losses, and of times that the clock was set back, before a time."""
    back = [fault for fault in history.faults.all if fault.kind == "clock" and fault.begin["seconds"] < 0]
    return sum(fault.begin.at <= at for fault in (*back, *history.losses)) + sum(
        fault.until <= at for fault in (*back, *history.losses)
    )


def _check_order(history: History) -> Iterator[Violation]:
    """Check that each task of an ordered key starts after those that were enqueued before have ended."""
    tenants: dict[str, list[Task]] = defaultdict(list)
    for task in history.tasks.values():
        if task.kind in _ORDERED and task.enqueue is not None and not task.enqueue["delay"] and task.runs:
            tenants[task.enqueue["args"]["tenant"]].append(task)
    for tasks in tenants.values():
        tasks.sort(key=lambda task: task.enqueue.at if task.enqueue else 0)
        for earlier, later in combinations(tasks, 2):
            yield from _check_turn(history, earlier, later)


def _check_turn(history: History, earlier: Task, later: Task) -> Iterator[Violation]:
    start = min(run.at for run in later.runs)
    for run in earlier.runs:
        last = run.end.at if run.end is not None else _last(run, ())
        if last <= start or history.replayed_between(0, last, task=earlier.id):
            continue
        if _excused(history, run, start) or any(
            loss.begin.at <= last and loss.until >= start - round(2 * history.lease * SECOND) for loss in history.losses
        ):
            continue  # or Redis has lost the end of the earlier one
        what = f"{later.id} started before {earlier.id}, which was enqueued earlier, had ended"
        told = (earlier.enqueue, run.first, run.end, later.enqueue, later.runs[0].first)
        yield Violation("overtaken", what, tuple(line for line in told if line is not None))
        return


def _excused(history: History, run: Run, start: int) -> bool:
    """Return whether a run may go on after another worker has ended its task, since a fault has hit its process."""
    slack = round(2 * history.lease * SECOND)
    return run.at < start and history.faults.explain(run.pid, run.at - slack, start) is not None
