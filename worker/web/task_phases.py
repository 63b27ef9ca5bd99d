"""Phases of a task: when it waited for a worker, was delayed or parked, and ran; and the steps of its runs.

They are computed from the record and the event log, which says when a run ended and why, and when the next one began.
The first run of a task logs no start: until its first event the task waited or ran, and `exact` is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from ...queues.event_log import TaskEvent
from ...queues.records import Record, State
from ...queues.wording import short, waited_for
from ..durable.journal.event import RECORDED


class PhaseKind(StrEnum):
    """Kind of a phase."""

    QUEUED = "queued"
    """Its message waits for a worker."""
    DELAYED = "delayed"
    """It is due later: a delay, a backoff or a pause."""
    PARKED = "parked"
    """It waits for something, without a worker."""
    RUNNING = "running"
    """A worker runs it."""
    LOST = "lost"
    """Its worker is gone, and no other one has claimed it yet."""
    DEAD = "dead"
    """It is a dead letter."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase. Times are milliseconds of Redis' clock.

    Attributes:
        end: None while it lasts.
        exact: Whether its start is known; else it is the earliest possible time.
        what: What it waits for, or how it ended.
    """

    kind: PhaseKind
    start: int
    end: int | None = None
    exact: bool = True
    what: str = ""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Time of a step, or of one of its tries.

    Attributes:
        start: Its start; if `exact` is false, the earliest possible one.
        end: None while it runs.
        outcome: `running`, `recorded`, `failed` or `cut off`.
        attempt: Number of the try.
    """

    key: str
    start: int
    end: int | None
    outcome: str
    attempt: int = 1
    exact: bool = True
    tool: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """An incident at one time: a failed attempt, a crash, a replay, a decision of a person."""

    at: int
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class TaskPhases:
    """Phases, steps and incidents of a task, each in the order of time. start, end: of all of it."""

    start: int
    end: int
    phases: Sequence[Phase]
    steps: Sequence[StepSpan]
    marks: Sequence[Mark]

    def total(self, kind: PhaseKind) -> int:
        """Return the milliseconds of all phases of a kind."""
        spans = (
            (phase.start, self.end if phase.end is None else phase.end) for phase in self.phases if phase.kind is kind
        )
        return sum(end - start for start, end in spans)


_DELAYED: Final = {
    "attempt_failed": "attempt failed",
    "snoozed": "asked to run again later",
    "returned": "returned by its worker",
    "crash_backoff": "crashed more than once",
}
"""Types of events that end a run after which the task is due after a delay, and what happened."""

_NOTED: Final = {
    "buried": "became a dead letter",
    "crashed": "worker died",
    "replayed": "replayed",
    "step_resolved": "step resolved",
    "failures_dropped": "recorded failures dropped",
    "forked": "forked",
    "corrected": "state corrected",
    "data_lost": "Redis lost entries",
    "limit_lost": "lost its token of a limit",
    "handed_off": "handed off",
}
"""Types of events that are incidents, and what happened."""


def phases_of(record: Record, events: Iterable[TaskEvent], now: int, *, start: int | None = None) -> TaskPhases:
    """Return the phases of a task.

    Args:
        events: The log, or its end, the oldest first.
        now: Milliseconds of Redis' clock.
        start: Time before which nothing is shown, if the events are the end of the log. Default: its enqueueing.
    """
    found = list(events)
    first = start if start is not None else record.enqueued_at
    walk = _Walk(first if first is not None else found[0].at if found else now)
    for event in found:
        walk.add(event)
    walk.end(record, now)
    spans: list[Phase | StepSpan] = [*walk.phases, *walk.steps]
    end = max(walk.phases[0].start, *(now if span.end is None else span.end for span in spans))
    steps = sorted(walk.steps, key=lambda step: (step.start, end if step.end is None else step.end))
    return TaskPhases(walk.phases[0].start, end, walk.phases, steps, walk.marks)


class _Walk:
    """The phases up to an event; the last one lasts."""

    def __init__(self, start: int) -> None:
        self.phases = [Phase(PhaseKind.QUEUED, start)]
        self.steps: list[StepSpan] = []
        self.marks: list[Mark] = []
        self._open: dict[str, StepSpan] = {}
        self._boundary = start  # the earliest start of the step that ends next
        self._due: int | None = None  # the time at which the phase that lasts ends by itself

    def _enter(self, kind: PhaseKind, at: int, what: str = "", *, exact: bool = True, due: int | None = None) -> None:
        """End the phase that lasts, and begin another one. One of no time is left out."""
        last = self.phases[-1]
        at = max(at, last.start)
        self._due = due
        if last.kind is kind and not what:
            return
        if at == last.start:
            self.phases.pop()
        else:
            self.phases[-1] = replace(last, end=at)
        self.phases.append(Phase(kind, at, exact=exact, what=what))
        if kind is PhaseKind.RUNNING:
            self._boundary = at

    def _stop(self, at: int, what: str = "") -> None:
        """End the run that lasts, if one does, with the steps that it was in."""
        last = self.phases[-1]
        if last.kind is PhaseKind.RUNNING:
            self.phases[-1] = replace(last, what=what)
        self.steps += [replace(step, end=max(at, step.start), outcome="cut off") for step in self._open.values()]
        self._open.clear()

    def _run(self, at: int, *, exact: bool) -> None:
        """Begin a run unless one lasts. exact: whether it begins at this time, and not before."""
        last = self.phases[-1]
        if last.kind is PhaseKind.RUNNING:
            return
        if self._due is not None and last.kind in (PhaseKind.DELAYED, PhaseKind.PARKED) and self._due < at:
            self._enter(PhaseKind.QUEUED, self._due)
        self._enter(PhaseKind.RUNNING, at, exact=exact)

    def add(self, event: TaskEvent) -> None:
        """Add what an event says."""
        data: dict[str, Any] = event.data if isinstance(event.data, dict) else {}
        kind, at = event.type, event.at
        if kind in _DELAYED:
            self._run(at, exact=False)
            self._stop(at, _DELAYED[kind])
            self.marks.append(Mark(at, kind, _error_of(data) or _DELAYED[kind]))
            delay = _number(data.get("delay"))
            self._enter(PhaseKind.DELAYED, at, _DELAYED[kind], due=None if delay is None else at + round(delay * 1000))
            return
        if kind in _NOTED:
            self.marks.append(Mark(at, kind, _text_of(kind, data)))
        if kind == "crashed":
            self._stop(at, _NOTED[kind])
            self._enter(PhaseKind.LOST, at, _NOTED[kind])
        elif kind == "buried":
            self._stop(at, _NOTED[kind])
            self._enter(PhaseKind.DEAD, at, _error_of(data))
        elif kind == "replayed":
            self._enter(PhaseKind.QUEUED, at, _NOTED[kind])
        elif kind == "handed_off":
            self._stop(at, _NOTED[kind])
            self._enter(PhaseKind.QUEUED, at, _NOTED[kind])
        elif kind == "limit_lost":
            self._stop(at, _NOTED[kind])
            self._enter(PhaseKind.PARKED, at, f"limit {_shown(data.get('limit'))}")
        elif kind == "resumed":
            self._resume(at, data)
        elif kind == "waiting":
            self._run(at, exact=False)
            self._stop(at, "waits")
            until = _number(data.get("until"))
            what = waited_for(_shown(data.get("what")) or "message")
            self._enter(PhaseKind.PARKED, at, what, due=None if until is None else int(until))
        elif event.number is not None or kind in RECORDED:
            self._of_run(event, data)
            if kind == "children_joined":
                self._name_wait(waited_for("children"))

    def _name_wait(self, what: str) -> None:
        """Say what the last parked phase waited for, if the log has not said so."""
        index = next((at for at in range(len(self.phases) - 1, -1, -1) if self.phases[at].what == _WAKE_UP), None)
        if index is not None:
            self.phases[index] = replace(self.phases[index], what=what)

    def _resume(self, at: int, data: dict[str, Any]) -> None:
        """Begin a run that resumes the work of an earlier one, whose end the log may not have."""
        after, gap, queued = data.get("after"), _number(data.get("gap")), _number(data.get("queued"))
        if self.phases[-1].kind is PhaseKind.RUNNING:
            ended = at if gap is None else at - round(gap * 1000)
            ended = max(ended, self.phases[-1].start)
            if after == "crash":
                self.marks.append(Mark(ended, "crashed", "worker gone"))
                self._stop(ended, "worker gone")
                self._enter(PhaseKind.LOST, ended, "worker gone")
            elif after == "wait":
                self._stop(ended, "waits")
                self._enter(PhaseKind.PARKED, ended, _WAKE_UP)
            else:
                self._stop(ended)
                self._enter(PhaseKind.QUEUED, ended)
        if queued is not None and self.phases[-1].kind in (PhaseKind.DELAYED, PhaseKind.PARKED):
            self._enter(PhaseKind.QUEUED, at - round(queued * 1000))
        self._run(at, exact=True)

    def _of_run(self, event: TaskEvent, data: dict[str, Any]) -> None:
        """Add an event of a working run."""
        at, key = event.at, event.step
        took = _number(data.get("ms"))
        began = at if took is None else at - round(took)
        self._run(began, exact=False)
        if key is None:
            self._boundary = max(self._boundary, at)
            return
        attempt = data.get("attempt")
        attempt = attempt if isinstance(attempt, int) else 1
        if event.type == "step_started":
            self._open[key] = StepSpan(key, at, None, "running", attempt)
            return
        if event.type not in (*RECORDED, "step_failed"):
            return
        failed = event.type == "step_failed"
        started = self._open.pop(key, None)
        start = started.start if started is not None else began if took is not None else min(self._boundary, at)
        tool = data.get("tool")
        self.steps.append(
            StepSpan(
                key,
                start,
                at,
                "failed" if failed else "recorded",
                attempt,
                started is not None or took is not None,
                tool if isinstance(tool, str) else None,
                _error_of(data) if failed else "",
            )
        )
        self._boundary = max(self._boundary, at)

    def end(self, record: Record, now: int) -> None:
        """Add what the record says of the phase that lasts, and end that of a task that has ended."""
        state, last = record.state, self.phases[-1]
        finished, began = record.finished_at, record.started_at
        if finished is not None and record.ran_ms is not None and state.terminal:
            began = finished - record.ran_ms
        if state is State.RUNNING:
            if last.kind is not PhaseKind.RUNNING:
                self._queue(record.queued_at)
                self._run(now if began is None else began, exact=began is not None)
            if record.step is not None and record.step not in self._open:
                at = self._boundary if record.step_at is None else record.step_at
                self._open[record.step] = StepSpan(record.step, at, None, "running", exact=record.step_at is not None)
        elif state is State.QUEUED and last.kind is not PhaseKind.QUEUED:
            self._queue(record.queued_at if record.queued_at is not None else now)
        elif state is State.SCHEDULED and last.kind is not PhaseKind.DELAYED:
            self._rest(PhaseKind.DELAYED, "held by a pause" if record.paused_by is not None else "")
        elif state in (State.WAITING, State.LIMITED) and last.kind is not PhaseKind.PARKED:
            self._rest(PhaseKind.PARKED, waited_for(record.waits) if record.waits else "")
        elif state is State.SUCCEEDED and last.kind is not PhaseKind.RUNNING and began is not None:
            self._run(began, exact=True)
        if began is not None:
            self._correct_start(began)
        if state is State.RUNNING:
            self.steps += self._open.values()
        elif state in (State.SUCCEEDED, State.CANCELLED):
            at = max(now if finished is None else finished, self.phases[-1].start)
            self._stop(at, str(state))
            self.phases[-1] = replace(self.phases[-1], end=at)
        else:
            self._stop(now)

    def _queue(self, since: int | None) -> None:
        if since is not None and self.phases[-1].kind is not PhaseKind.QUEUED:
            self._stop(since)
            self._enter(PhaseKind.QUEUED, since)

    def _rest(self, kind: PhaseKind, what: str) -> None:
        """Begin the phase of a task that rests since a time which the log does not have."""
        last = self.phases[-1]
        if last.kind is PhaseKind.RUNNING:
            self._stop(self._boundary)
            self._enter(kind, self._boundary, what, exact=False)
        else:  # it never ran, or was put there from a queue
            self.phases[-1] = replace(last, kind=kind, what=what)

    def _correct_start(self, began: int) -> None:
        """Set the start of the last run, which the record has, if the log has only a later time."""
        index = next(
            (at for at in reversed(range(len(self.phases))) if self.phases[at].kind is PhaseKind.RUNNING), None
        )
        if index is None or self.phases[index].exact:
            return
        run = self.phases[index]
        if began > run.start or (index and began < self.phases[index - 1].start):
            return
        self.phases[index] = replace(run, start=began, exact=True)
        if index:
            self.phases[index - 1] = replace(self.phases[index - 1], end=began)


_WAKE_UP: Final = "to be woken"
"""Text for a wait that the log does not name."""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < _LARGEST else None


_LARGEST: Final = 1e15
"""A larger number of an event is no time."""


def _shown(value: Any) -> str:
    return short(value) if isinstance(value, str) else ""


def _error_of(data: dict[str, Any]) -> str:
    """Return name and message of the error of an event."""
    return ": ".join(text for text in (_shown(data.get("error")), _shown(data.get("message"))) if text)


def _text_of(kind: str, data: dict[str, Any]) -> str:
    """Return what an incident says about itself."""
    details = {
        "buried": _error_of(data),
        "crashed": _shown(data.get("how")),
        "replayed": "without its checkpoint" if data.get("fresh") is True else "",
        "step_resolved": " ".join(filter(None, (_shown(data.get("step")), _shown(data.get("decision"))))),
        "forked": f"from task {_shown(data.get('source'))}",
        "limit_lost": _shown(data.get("limit")),
        "handed_off": _shown(data.get("why")),
    }
    return ": ".join(filter(None, (_NOTED[kind], details.get(kind, ""))))
