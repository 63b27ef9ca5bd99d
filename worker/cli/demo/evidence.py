"""Evidence of the demo: claims about a run, counted from what the run left behind.

A kill cuts off the step that its worker logged last. That step may have been recorded in the instant before the kill.
So each kill allows one further run of that step, and of no other step.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .app import ATTEMPTS
from .journal import StepRun
from .processes import Kill

__all__ = ["LEASE", "Claim", "DemoEvidence", "Takeover"]

LEASE: Final = 1.5
"""Lease of the workers in seconds."""

_TAKEOVER_LIMIT: Final = LEASE + 5.0
"""Seconds within which another worker must resume the task of a killed one."""


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

    steps, planned_kills: what the run was set up with.
    runs, crashes, completed: step runs of the report in the journal, crashes in its record, completed steps in its
        event log.
    expected_sha256, published_sha256: of a report made without workers, and of the published file.
    attempts, kept, publish_runs, letters: attempts and completed steps of the dead letter, its step runs in the
        journal, and dead letters left at the end.
    """

    steps: int
    planned_kills: int
    kills: Sequence[Kill]
    runs: Sequence[StepRun]
    crashes: int
    completed: Sequence[str]
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
        last = {run.pid: run.step for run in self.runs}
        killed = sum(kill.status == -signal.SIGKILL and kill.pid in last for kill in self.kills)
        once = sum(count == 1 for count in Counter(self.completed).values())
        cut_off = Counter(last[kill.pid] for kill in self.kills if kill.pid in last)
        most, again = cut_off.total(), Counter(run.step for run in self.runs)
        again.subtract(set(again))
        seconds = [one.seconds for one in self.takeovers() if one.seconds is not None]
        slowest = max(seconds) if seconds and len(seconds) == len(self.kills) else None
        in_time, limit = slowest is not None and slowest < _TAKEOVER_LIMIT, f"under {_TAKEOVER_LIMIT:g} s"
        kept = Counter(run.step for run in self.publish_runs if run.step in self.kept)
        kept_again = kept.total() - len(kept) if self.kept and len(kept) == len(self.kept) else None
        return [
            _equal("killed", "Workers killed by SIGKILL", killed, self.planned_kills, "exit status"),
            _equal("crashes", "Crashes counted", self.crashes, len(self.kills), "task record"),
            _equal("completed", "Steps recorded once", once, self.steps, "event log"),
            Claim("repeated", "Steps run again", again.total(), f"up to {most}", "journal", again <= cut_off),
            Claim("takeover", "Slowest kill to next step", slowest, limit, "journal", in_time),
            _equal("attempts", "Attempts until dead letter", self.attempts, ATTEMPTS, "dead letter"),
            _equal("kept_repeated", "Kept steps run again", kept_again, 0, "journal"),
            _equal("published", "Report, SHA-256", self.published_sha256, self.expected_sha256, "file"),
            _equal("letters", "Dead letters left", self.letters, 0, "dead letters"),
        ]


def _equal(claim: str, statement: str, counted: int | str | None, expected: int | str, source: str) -> Claim:
    return Claim(claim, statement, counted, str(expected)[:8], source, counted == expected)
