"""Evidence of the demo: claims about a run, counted from what the run left behind.

A kill cuts off the step that its worker logged last. That step may have been recorded in the instant before the kill.
So each kill allows one further run of that step, and of no other step.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .journal import StepRun
from .processes import Kill

__all__ = ["Claim", "DemoEvidence", "Takeover"]

_TAKEOVER_MARGIN: Final = 5.0
"""Seconds beyond the lease within which another worker must resume the task of a killed one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement that must hold. counted: None if there was nothing to count. source: where it was counted."""

    id: str
    statement: str
    counted: int | float | str | None
    allowed: str
    source: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Takeover:
    """One kill and the next step run by another worker, if there was one.

    started: steps started until the kill. subject: the file of the killed worker's last step, or empty.
    """

    killed: int
    started: int
    subject: str
    resumed_by: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DemoEvidence:
    """Observations of one run.

    steps, planned_kills, max_attempts, lease: what the run was set up with.
    runs, crashes, completed: step runs of the report in the journal, crashes in its record, completed steps in its
        event log.
    report_sha256, expected_sha256, published_sha256: of the artifact, of a report made without workers, and of the
        published file.
    attempts, kept, publish_runs, letters: attempts and completed steps of the dead letter, its step runs in the
        journal, and dead letters left at the end.
    """

    steps: int
    planned_kills: int
    max_attempts: int
    lease: float
    kills: Sequence[Kill]
    runs: Sequence[StepRun]
    crashes: int
    completed: Sequence[str]
    report_sha256: str
    expected_sha256: str
    published_sha256: str
    attempts: int
    kept: Sequence[str]
    publish_runs: Sequence[StepRun]
    letters: int

    def takeovers(self) -> list[Takeover]:
        """Return what followed each kill."""
        return [self._takeover(kill) for kill in self.kills]

    def _takeover(self, kill: Kill) -> Takeover:
        started = len({run.step for run in self.runs if run.at <= kill.at})
        subject = next((run.subject for run in reversed(self.runs) if run.pid == kill.pid), "")
        after = next((run for run in self.runs if run.at > kill.at and run.pid != kill.pid), None)
        if after is None:
            return Takeover(kill.pid, started, subject, None, None)
        return Takeover(kill.pid, started, subject, after.pid, round(after.at - kill.at, 3))

    def claims(self) -> list[Claim]:
        """Return all claims with their verdicts."""
        pids = {run.pid for run in self.runs}
        killed = sum(kill.status == -signal.SIGKILL and kill.pid in pids for kill in self.kills)
        completed = len(set(self.completed))
        return [
            _equal("killed", "Workers killed by SIGKILL", killed, self.planned_kills, "exit status"),
            _equal("crashes", "Crashes counted", self.crashes, len(self.kills), "task record"),
            _equal("completed", "Steps recorded", completed, self.steps, "event log"),
            _equal("completed_twice", "Steps recorded twice", len(self.completed) - completed, 0, "event log"),
            self._steps_repeated(),
            self._slowest_takeover(),
            _equal("report", "Report, SHA-256", self.report_sha256, self.expected_sha256, "artifact"),
            _equal("attempts", "Attempts until dead letter", self.attempts, self.max_attempts, "dead letter"),
            self._kept_repeated(),
            _equal("published", "Published file, SHA-256", self.published_sha256, self.expected_sha256, "file"),
            _equal("letters", "Dead letters left", self.letters, 0, "dead letters"),
        ]

    def _steps_repeated(self) -> Claim:
        last = {run.pid: run.step for run in self.runs}
        cut_off = Counter(last[kill.pid] for kill in self.kills if kill.pid in last)
        again = Counter(run.step for run in self.runs)
        again.subtract(set(again))
        allowed = f"up to {cut_off.total()} cut off"
        return Claim("repeated", "Steps run again", again.total(), allowed, "journal", again <= cut_off)

    def _slowest_takeover(self) -> Claim:
        seconds = [math.inf if one.seconds is None else one.seconds for one in self.takeovers()]
        slowest, limit = max(seconds, default=math.inf), self.lease + _TAKEOVER_MARGIN
        counted = None if slowest == math.inf else slowest
        return Claim("takeover", "Slowest kill to next step", counted, f"under {limit:g} s", "journal", slowest < limit)

    def _kept_repeated(self) -> Claim:
        runs = Counter(run.step for run in self.publish_runs if run.step in self.kept)
        again = runs.total() - len(runs) if self.kept and len(runs) == len(self.kept) else None
        return _equal("kept_repeated", "Kept steps run again", again, 0, "journal")


def _equal(claim: str, statement: str, counted: int | str | None, expected: int | str, source: str) -> Claim:
    allowed = expected[:8] if isinstance(expected, str) else f"{expected}"
    return Claim(claim, statement, counted, allowed, source, counted == expected)
