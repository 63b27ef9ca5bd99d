"""Progress of a run: what a handler reports about how far it is, for people and programs that wait."""

from __future__ import annotations

import math

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ..errors import StepOutsideTask
from .run import Run

_NOTE = 200
"""Most characters of a note; a longer one is cut."""


def report_progress(run: Run, done: float, total: float | None, note: str) -> None:
    """Report how far a run is. Raises `ValueError`, and `StepOutsideTask` after its end.

    It restarts the idle time. It excuses no crash: nothing is recorded that a resumed run could continue from.
    """
    if run.closed:
        raise StepOutsideTask("ctx.progress was called after the task had ended")
    _check_number("done", done)
    if total is not None:
        _check_number("total", total)
        if not total:
            raise ValueError("total must be more than 0, or None if it is unknown, got 0")
    if run.redact is not None:
        note = run.redact(note)
    if len(note) > _NOTE:
        note = f"{note[: _NOTE - 3]}..."
    run.touch()
    run.recorder.report(Entry(Kind.PROGRESS, "", orjson.dumps({"done": done, "total": total, "note": note})))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
