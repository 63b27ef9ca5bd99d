"""Rules of schedules: a planned time has one task, and none is missed of a schedule that makes up for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from ...journal import SECOND, Line
from ...planned import PLANS, planned_by
from ..history import History, Violation

__all__ = ["check_schedules", "fired"]

_ENDED: Final = ("succeeded", "dead", "cancelled")

_BEFORE: Final = 5 * SECOND
_AFTER: Final = 15 * SECOND
"""Nanoseconds around a planned time in which its task is stored: another worker takes over within three seconds."""

_MADE_UP_FOR: Final = 100
"""Missed times that a firing makes up for at most."""


def check_schedules(history: History) -> Iterator[Violation]:
    """Check the rules."""
    for (name, planned), lines in fired(history).items():
        if len(lines) > 1:
            yield Violation("fired twice", f"{name} of {planned} has {len(lines)} tasks", tuple(lines))
        if planned % (PLANS[name].every * 1000):
            what = f"{name} has a task of {planned}, which is no planned time"
            yield Violation("fired at another time", what, tuple(lines))
        for line in lines:
            if line["state"] not in _ENDED:
                what = f"{line['task']} was fired, and is {line['state']} though time was given"
                yield Violation("lost", what, (line,))
    for line in history.lines:
        if line.what == "schedule" and line["name"] in PLANS and PLANS[line["name"]].all:
            yield from _check_missed(history, line)


def fired(history: History) -> dict[tuple[str, int], list[Line]]:
    """Return the records at the end of what was fired, by schedule and planned time."""
    found: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in history.lines:
        if line.what == "final" and (plan := planned_by(line["task"])) is not None:
            found[plan].append(line)
    return found


def _check_missed(history: History, line: Line) -> Iterator[Violation]:
    """Check that each planned time up to the last one that was fired has a task, unless Redis has lost it."""
    name, every = line["name"], PLANS[line["name"]].every * 1000
    known = {planned for schedule, planned in fired(history) if schedule == name}
    expected = range((line["epoch"] // every + 1) * every, line["last"] + 1, every)
    for planned in expected:
        at = _reached(history, planned)
        if planned in known or at is None or _too_many(history, at, every):
            continue
        if not any(loss.begin.at <= at + _AFTER and loss.until >= at - _BEFORE for loss in history.losses):
            yield Violation("not fired", f"{name} of {planned} has no task, and later ones have", (line,))


def _steps(history: History) -> Iterator[tuple[int, int]]:
    """Yield the times at which Redis' clock was set, and the milliseconds."""
    for fault in history.faults.all:
        if fault.kind == "clock":
            yield fault.begin.at, fault.begin["seconds"] * 1000


def _reached(history: History, planned: int) -> int | None:
    """Return when Redis' clock reached a time in milliseconds first; None if the journal does not tell."""
    begins = next((line for line in history.lines if line.what == "begins" and "clock" in line.data), None)
    if begins is None:
        return None
    start, ahead = float(begins["clock"]), 0.0
    for at, step in _steps(history):
        reached = begins.at + (planned - start - ahead) * SECOND / 1000
        if reached <= at:
            return round(reached)
        ahead += step
        if start + (at - begins.at) * 1000 / SECOND + ahead >= planned:
            return at
    return round(begins.at + (planned - start - ahead) * SECOND / 1000)


def _too_many(history: History, at: int, every: int) -> bool:
    """Return whether more times may have been missed at once than a firing makes up for."""
    around = sum(step for when, step in _steps(history) if step > 0 and abs(when - at) < 60 * SECOND)
    return around > (_MADE_UP_FOR - 15) * every
