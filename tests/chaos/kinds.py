"""Kinds of tasks of a run, and the outcomes that each may have; used by producers, handlers and the checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "PATIENT", "Kind"]

PATIENT: Final = 50
"""Crash limit of an innocent task: more than one task has in any run."""


@dataclass(frozen=True, slots=True)
class Kind:
    """weight: relative frequency. attempts, crashes: limits of its retry policy. deaths: reasons with which it may
    become a dead letter. succeeds: whether it may succeed. queue: the queue it is enqueued on.
    """

    weight: int
    attempts: int = 3
    crashes: int = PATIENT
    deaths: frozenset[str] = frozenset()
    succeeds: bool = True
    queue: str = "default"


KINDS: Final[dict[str, Kind]] = {
    "chain": Kind(48),
    "hasty": Kind(32),
    "threads": Kind(20),
    "plain": Kind(16),
    "bulky": Kind(4),
    "fans": Kind(20),
    "agent": Kind(24),
    "tries": Kind(16),
    "saves": Kind(20),
    "payment": Kind(20),
    "doubtful": Kind(8, deaths=frozenset({"in_doubt"})),
    "stumbles": Kind(16, attempts=4),
    "dozes": Kind(12),
    "fails": Kind(10, deaths=frozenset({"attempts_exhausted"}), succeeds=False),
    "overtime": Kind(6, attempts=2, deaths=frozenset({"timeout"}), succeeds=False),
    "fragile": Kind(12, crashes=1, deaths=frozenset({"crash_loop"})),
    "poison": Kind(1, crashes=2, deaths=frozenset({"crash_loop"}), succeeds=False),
    "keyed": Kind(28, queue="keyed"),
}
