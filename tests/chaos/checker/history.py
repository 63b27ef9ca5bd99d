"""History of a run, built from its journal: tasks with their runs and steps, faults, processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..journal import Line
from ..kinds import KINDS, Kind
from .faults import LOSSES, Fault, Faults

__all__ = ["Fence", "History", "Run", "Task", "Violation", "history"]


class Fence(NamedTuple):
    """Order of the deliveries of a task: later ones are greater. entry: stream entry. handed: delivery count."""

    entry: tuple[int, int]
    handed: int


@dataclass(slots=True)
class Run:
    """One run of a handler. begins, values, effects: the lines, in order. progress: what a step saved and
    found. end: `returned` or `left`, if it ended."""

    name: str
    first: Line
    fence: Fence
    begins: list[Line] = field(default_factory=list)
    values: list[Line] = field(default_factory=list)
    effects: list[Line] = field(default_factory=list)
    progress: list[Line] = field(default_factory=list)
    end: Line | None = None

    @property
    def pid(self) -> int:
        return self.first.pid

    @property
    def at(self) -> int:
        return self.first.at

    @property
    def order(self) -> tuple[Fence, int]:
        """Order of the runs of a task."""
        return self.fence, self.at

    @property
    def failed(self) -> bool:
        """Whether its handler raised an error of its own: an attempt, not a fault."""
        return self.end is not None and self.end.what == "left" and self.end["error"] not in _ENDED_FROM_OUTSIDE

    def value(self, step: str) -> Line | None:
        """Return the line of the value of a step, None if the handler did not get it."""
        return next((line for line in self.values if line["step"] == step), None)

    def began(self, step: str) -> bool:
        return any(line["step"] == step for line in self.begins)


_ENDED_FROM_OUTSIDE = ("CancelledError", "LeaseLost", "RunStopped")


@dataclass(slots=True)
class Task:
    """One task, as in the journal. replies: answers on their way to it. births: runs of a child, with its spot.
    emits: what its bodies have emitted; streams: what is stored; shown: what pages had at their ends; unshown: pages
    without one. holds: the lines of its runs in limits.
    """

    id: str
    kind: str = ""
    enqueue: Line | None = None
    acknowledged: Line | None = None
    runs: list[Run] = field(default_factory=list)
    outcomes: list[Line] = field(default_factory=list)
    cancels: list[Line] = field(default_factory=list)
    answers: list[Line] = field(default_factory=list)
    seen: list[Line] = field(default_factory=list)
    sent: list[Line] = field(default_factory=list)
    replies: list[Line] = field(default_factory=list)
    used: list[Line] = field(default_factory=list)
    births: list[Line] = field(default_factory=list)
    joined: list[Line] = field(default_factory=list)
    emits: list[Line] = field(default_factory=list)
    streams: list[Line] = field(default_factory=list)
    shown: list[Line] = field(default_factory=list)
    unshown: list[Line] = field(default_factory=list)
    holds: list[Line] = field(default_factory=list)
    final: Line | None = None
    ledger: Line | None = None

    @property
    def parent(self) -> str | None:
        """Id of the parent, which is in the spot of a child; None of other tasks."""
        line = self.births[0] if self.births else self.final
        spot = None if line is None else line.get("spot")
        return spot.rpartition("/")[0] if isinstance(spot, str) else None

    @property
    def rules(self) -> Kind:
        """Outcomes that the kind of the task allows."""
        return KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated guarantee: which one, how, and the lines that show it."""

    rule: str
    what: str
    lines: tuple[Line, ...] = ()


@dataclass(slots=True)
class History:
    """A whole run. start: time of the first line. lease: the longest that was in force, in seconds."""

    start: int
    lease: float
    tasks: dict[str, Task]
    faults: Faults
    replays: list[Fault]
    losses: list[Fault]
    lines: list[Line]

    @property
    def end(self) -> int:
        """Time of the last line."""
        return self.lines[-1].at if self.lines else 0

    def lost(self, at: int, until: int, *, asked: int | None = None) -> bool:
        """Return whether Redis has lost, before `until`, what it had stored by a time. asked: if known, since when."""
        since = at if asked is None else asked
        return any(loss.kept < at and since <= loss.until and loss.begin.at <= until for loss in self.losses)

    def forgot(self, task: Task, until: int) -> bool:
        """Return whether Redis has lost an acknowledged task before a time."""
        line = task.acknowledged
        return line is not None and self.lost(line.at, until, asked=line.get("since"))

    def replayed_between(self, since: int, until: int, *, fresh: bool = False, task: str | None = None) -> bool:
        """Return whether dead letters may have been replayed between two times, or that of one task.

        fresh: without their checkpoint.
        """
        return any(
            replay.begin.at <= until
            and replay.until >= since
            and (replay.begin["fresh"] or not fresh)
            and replay.begin.get("letter") in (None, task)
            for replay in self.replays
        )


_OF_A_RUN: Final = {"begin": "begins", "value": "values", "effect": "effects", "saved": "progress", "found": "progress"}
_OF_A_TASK: Final = {
    "outcome": "outcomes",
    "cancel": "cancels",
    "answer": "answers",
    "seen": "seen",
    "sent": "sent",
    "answering": "replies",
    "answered": "replies",
    "unsure": "replies",
    "refused": "replies",
    "used": "used",
    "child": "births",
    "joined": "joined",
    "emits": "emits",
    "stream": "streams",
    "shown": "shown",
    "unshown": "unshown",
    "holds": "holds",
    "held": "holds",
    "frees": "holds",
}


def history(lines: Iterable[Line]) -> History:
    """Build the history of lines in the order of their times."""
    listed = list(lines)
    tasks: dict[str, Task] = {}
    runs: dict[str, Run] = {}
    for line in listed:
        if line.get("task") is None:
            continue
        task = tasks.setdefault(line["task"], Task(line["task"]))
        task.kind = task.kind or line.get("kind") or ""
        if line.what == "run":
            runs[line["run"]] = Run(line["run"], line, _fence(line))
            task.runs.append(runs[line["run"]])
        elif line.what in _OF_A_RUN:
            getattr(runs[line["run"]], _OF_A_RUN[line.what]).append(line)
        elif line.what in ("returned", "left"):
            runs[line["run"]].end = line
        elif line.what in _OF_A_TASK:
            getattr(task, _OF_A_TASK[line.what]).append(line)
        elif line.what == "acknowledged":  # a child is, in each run of its parent
            task.acknowledged = task.acknowledged or line
        elif line.what in ("enqueue", "final", "ledger"):
            setattr(task, line.what, line)
    for task in tasks.values():
        task.runs.sort(key=lambda run: run.order)
    begins = next((line for line in listed if line.what == "begins"), None)
    stored = [float(line["lease"]) for line in listed if line.what == "stored"]
    lease = max(float(begins["lease"]) if begins else 2.0, *stored, 0.0)
    faults = Faults(listed, lease)
    replays = [fault for fault in faults.all if fault.kind == "replay"]
    losses = [fault for fault in faults.all if fault.kind in LOSSES]
    return History(listed[0].at if listed else 0, lease, tasks, faults, replays, losses, listed)


def _fence(line: Line) -> Fence:
    milliseconds, _, number = line["entry"].partition("-")
    return Fence((int(milliseconds), int(number)), line["count"])
