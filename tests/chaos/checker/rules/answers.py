"""Rules of answers: each is used at most once, for the question that it was for, and none that was stored is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ...journal import Line
from ..history import History, Task, Violation

__all__ = ["check_answers"]


@dataclass(slots=True)
class _Answer:
    """What the journal has of an answer, by its nonce: the calls of its sender, and the lines of its use."""

    calls: list[Line] = field(default_factory=list)
    used: list[Line] = field(default_factory=list)

    def call(self, what: str) -> Line | None:
        return next((line for line in self.calls if line.what == what), None)

    @property
    def lines(self) -> tuple[Line, ...]:
        return (*self.calls, *self.used)


def check_answers(history: History) -> Iterator[Violation]:
    """Check the rules."""
    answers: dict[str, _Answer] = {}
    for task in history.tasks.values():
        for line in task.replies:
            answers.setdefault(line["nonce"], _Answer()).calls.append(line)
        for line in task.used:
            if line["nonce"] is not None:
                answers.setdefault(line["nonce"], _Answer()).used.append(line)
        yield from _check_changed(history, task)
    for nonce, answer in answers.items():
        yield from _check_use(nonce, answer)
        yield from _check_lost(history, nonce, answer)


def _check_use(nonce: str, answer: _Answer) -> Iterator[Violation]:
    places = {(line["task"], line["wait"]) for line in answer.used}
    if len(places) > 1:
        what = f"answer {nonce} was used for {sorted(places)}"
        yield Violation("answer used twice", what, answer.lines)
    asked = answer.call("answering")
    for task, wait in places:
        if asked is None or asked["task"] != task or not _is_for(asked, wait):
            what = f"answer {nonce} was used for {wait} of {task}, which it was not for"
            yield Violation("answer to another question", what, answer.lines)
    if places and answer.call("refused") and not (answer.call("answered") or answer.call("unsure")):
        yield Violation("refused answer used", f"answer {nonce} was refused, and used", answer.lines)


def _is_for(asked: Line, wait: str) -> bool:
    """Return whether an answer is for a wait: for its id, for its name, or for its token, which names an order."""
    if asked["by"] == "token":
        return wait == "order"
    if asked["by"] == "name":
        return bool(wait.rpartition("/")[2].partition("#")[0] == asked["to"])
    return bool(wait == asked["to"])


def _check_lost(history: History, nonce: str, answer: _Answer) -> Iterator[Violation]:
    """Check that an answer which was stored is used, if its task has succeeded.

    That of a race may have come after the time. A clock that is set back lets an answer come in time after the run has
    seen that it is too late.
    """
    stored = answer.call("answered")
    if stored is None or answer.used:
        return
    task = history.tasks[stored["task"]]
    if task.final is None or task.final["state"] != "succeeded" or history.lost(stored.at, history.end):
        return
    timed = any(fault.kind == "clock" for fault in history.faults.all)
    if task.kind != "races" and not (task.kind == "expires" and timed):
        what = f"answer {nonce} to {stored['to']} of {task.id} was stored, and not used"
        yield Violation("answer lost", what, (*answer.lines, *task.used, task.final))


def _check_changed(history: History, task: Task) -> Iterator[Violation]:
    """Check that a wait has one answer in all runs."""
    by_wait: dict[str, list[Line]] = {}
    for line in task.used:
        by_wait.setdefault(line["wait"], []).append(line)
    for wait, lines in by_wait.items():
        for earlier, later in pairwise(lines):
            if earlier["nonce"] == later["nonce"] or history.lost(earlier.at, later.at):
                continue
            if not history.replayed_between(earlier.at, later.at, fresh=True):
                what = f"{task.id}, {wait}: answered with {earlier['nonce']}, and in a later run with {later['nonce']}"
                yield Violation("answer changed", what, (earlier, later))
