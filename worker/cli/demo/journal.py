"""The journal: one line for every time a step really ran, in a file of its own, outside Redis.

The step's function writes the line itself before it does anything else, so that a step cut off by a kill has left
its line too. A line is written by one `write` on a file opened for appending: lines of several processes never mix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from ...durable import current_step

__all__ = ["Journal", "Line", "note"]


@dataclass(frozen=True, slots=True)
class Line:
    """One run of one step. at: seconds of the machine's monotonic clock. subject: the file it was about, or empty."""

    at: float
    pid: int
    task: str
    step: str
    subject: str = ""


def note(path: str, subject: str = "") -> None:
    """Write the line of the step that is running here. Raises `StepOutsideTask`, `OSError`."""
    task, _, step = current_step().idempotency_key.partition(":")
    data = orjson.dumps([time.monotonic(), os.getpid(), task, step, subject]) + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, data)
    finally:
        os.close(file)


@dataclass(slots=True)
class Journal:
    """The journal, read while others write it."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _read: int = 0

    def refresh(self) -> bool:
        """Read the lines that have come; whether there were any."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.lines += [Line(*orjson.loads(line)) for line in whole.splitlines()]
        return bool(whole)

    def of(self, task: str) -> Sequence[Line]:
        """The lines of one task."""
        return [line for line in self.lines if line.task == task]
