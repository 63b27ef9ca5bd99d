"""Journal of step runs: one line for each run of a step, in a file outside Redis.

A step writes its line before it does anything else, so a step that a kill cuts off has left its line too. One `write`
to a file opened for appending makes one line: lines of several processes never mix.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from ...durable import current_step

__all__ = ["JOURNAL_VARIABLE", "StepRun", "log_step_run", "read_step_runs"]

JOURNAL_VARIABLE: Final = "DEMO_JOURNAL"
"""Environment variable that gives the workers the path of the journal."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run of a step. at: seconds of the machine's monotonic clock. subject: the file it works on, or empty."""

    at: float
    pid: int
    task: str
    step: str
    subject: str = ""


def log_step_run(subject: str = "") -> None:
    """Write the line of the current step. Raises `StepOutsideTask`, `OSError`."""
    task, _, step = current_step().idempotency_key.partition(":")
    line = orjson.dumps([time.monotonic(), os.getpid(), task, step, subject]) + b"\n"
    with Path(os.environ[JOURNAL_VARIABLE]).open("ab", buffering=0) as file:
        file.write(line)


def read_step_runs(path: Path, task: str) -> list[StepRun]:
    """Return the runs of one task's steps, leaving out a line that is not yet complete."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [run for run in (StepRun(*orjson.loads(line)) for line in lines) if run.task == task]
