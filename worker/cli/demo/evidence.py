"""The evidence: what is claimed of a run, as counted from what the run left behind. Pure: lines, events, figures in,
claims with a verdict out.

A step is cut off when its worker is killed: it is the last step that this worker noted in the journal. It may have
been recorded all the same, in the instant before; so each kill allows for one step to be run once more, and for no
other step.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .journal import Line
from .replicas import Kill
from .takeovers import takeovers

__all__ = [
    "Claim",
    "attempts_before_burial",
    "deliveries_lost",
    "kept_steps_run_again",
    "killed_at_work",
    "letters_left",
    "recorded_twice",
    "resumed",
    "same_contents",
    "steps_recorded",
    "steps_run",
    "steps_run_twice",
]

TAKEOVER_MARGIN: Final = 5.0
"""Seconds beyond the lease within which a killed worker's task must go on elsewhere."""

JOURNAL: Final = "journal"
REDIS: Final = "Redis"
FILES: Final = "files"


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that must hold. figure: what was counted, as data; shown: the same for people; allowed: the bound;
    source: where it was counted.
    """

    id: str
    what: str
    figure: int | float | str | None
    shown: str
    allowed: str
    source: str
    holds: bool

    def summary(self) -> dict[str, Any]:
        """The claim as plain data, for programs."""
        return asdict(self)


def _exactly(claim: str, what: str, figure: int, expected: int, source: str) -> Claim:
    return Claim(claim, what, figure, f"{figure:,}", f"{expected:,}", source, figure == expected)


def killed_at_work(kills: Sequence[Kill], lines: Sequence[Line], planned: int) -> Claim:
    """Workers that ran a step of the task and then ended by SIGKILL, by the system's own word."""
    workers = {line.pid for line in lines}
    killed = [kill for kill in kills if kill.status == -signal.SIGKILL and kill.pid in workers]
    return _exactly("killed_at_work", "Workers killed at work (SIGKILL)", len(killed), planned, "exit status")


def deliveries_lost(crashes: int, kills: Sequence[Kill]) -> Claim:
    """Deliveries without an outcome, as the task's record counts them: one for each kill, and no others."""
    return _exactly("deliveries_lost", "Deliveries without an outcome", crashes, len(kills), REDIS)


def steps_recorded(recorded: Collection[str], expected: int) -> Claim:
    """Steps of which the checkpoint has a result."""
    return _exactly("steps_recorded", "Steps recorded", len(set(recorded)), expected, REDIS)


def recorded_twice(logged: Sequence[str]) -> Claim:
    """Steps that the task's event log says were completed more than once."""
    twice = sum(count - 1 for count in Counter(logged).values())
    return _exactly("recorded_twice", "Steps recorded twice", twice, 0, REDIS)


def steps_run(lines: Sequence[Line], expected: int, kills: Sequence[Kill]) -> Claim:
    """Runs of steps, whether they came to an end or not."""
    allowed = f"{expected:,} to {expected + len(kills):,}"
    holds = expected <= len(lines) <= expected + len(kills)
    return Claim("steps_run", "Steps run", len(lines), f"{len(lines):,}", allowed, JOURNAL, holds)


def steps_run_twice(lines: Sequence[Line], kills: Sequence[Kill]) -> Claim:
    """Steps that were run again: only those that a kill cut off, and each once per kill."""
    last = {line.pid: line.step for line in lines}
    cut_off = Counter(last[kill.pid] for kill in kills if kill.pid in last)
    again = Counter(line.step for line in lines)
    again.subtract(set(again))
    figure = again.total()
    allowed = f"at most {cut_off.total()}, in hand at kills"
    return Claim("steps_run_twice", "Steps run twice", figure, f"{figure:,}", allowed, JOURNAL, again <= cut_off)


def resumed(lines: Sequence[Line], kills: Sequence[Kill], lease: float) -> Claim:
    """Seconds from a kill to the next step, the slowest of all."""
    seconds = [takeover.seconds for takeover in takeovers(lines, kills)]
    within = [one for one in seconds if one is not None]
    bound = lease + TAKEOVER_MARGIN
    slowest = max(within) if within and len(within) == len(seconds) else None
    return Claim(
        "seconds_to_resume",
        "Slowest kill to the next step",
        slowest,
        "never" if slowest is None else f"{slowest:.2f} s",
        f"under {bound:g} s, lease + {TAKEOVER_MARGIN:g} s",
        JOURNAL,
        slowest is not None and slowest < bound,
    )


def same_contents(claim: str, what: str, sha256: str, other: str, than: str) -> Claim:
    """One file is, byte by byte, what it should be. sha256, other: hexadecimal digests. than: what `other` is of."""
    return Claim(claim, what, sha256, f"sha256 {sha256[:8]}", f"{other[:8]}, {than}", FILES, sha256 == other)


def attempts_before_burial(attempts: int, allowed: int) -> Claim:
    """Attempts after which the failing task was given up."""
    return _exactly("attempts_before_burial", "Attempts until dead letter", attempts, allowed, "dead letter")


def kept_steps_run_again(lines: Sequence[Line], kept: Collection[str]) -> Claim:
    """Runs of the steps that the dead letter kept, beyond the first run of each."""
    runs = Counter(line.step for line in lines if line.step in kept)
    again = runs.total() - len(runs)
    claim = _exactly("kept_steps_run_again", f"Its {len(kept)} kept steps run again", again, 0, JOURNAL)
    if set(runs) != set(kept) or not kept:
        return Claim(claim.id, claim.what, None, "not run at all", claim.allowed, claim.source, False)
    return claim


def letters_left(letters: int) -> Claim:
    """Dead letters once the replay has succeeded."""
    return _exactly("letters_left", "Dead letters left", letters, 0, REDIS)
