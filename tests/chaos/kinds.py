"""Kinds of tasks of a run, and the outcomes that each may have; used by producers, handlers and the checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BOUNDS", "KINDS", "PATIENT", "Bound", "Kind", "drawn"]

PATIENT: Final = 50
"""Crash limit of an innocent task: more than one task has in any run."""


@dataclass(frozen=True, slots=True)
class Kind:
    """weight: relative frequency; 0 for what producers do not enqueue. attempts, crashes: limits of its retry policy.
    deaths: reasons with which it may become a dead letter. succeeds: whether it may succeed. queue: its queue.
    waits: whether it waits, or has children. streams: whether it emits. limits: whether it holds tokens of limits, or
    spends, for a tenant. dropped: whether it is cancelled for want of one. planned: whether schedules enqueue it.
    cancelled: part of its tasks that the producer cancels.
    """

    weight: int
    attempts: int = 3
    crashes: int = PATIENT
    deaths: frozenset[str] = frozenset()
    succeeds: bool = True
    queue: str = "default"
    waits: bool = False
    streams: bool = False
    limits: bool = False
    dropped: bool = False
    planned: bool = False
    cancelled: float = 0.06


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
    "sleeps": Kind(10, waits=True),
    "asks": Kind(12, waits=True),
    "early": Kind(6, waits=True),
    "orders": Kind(8, waits=True),
    "branches": Kind(8, waits=True),
    "races": Kind(8, waits=True),
    "expires": Kind(8, waits=True),
    "family": Kind(10, waits=True, cancelled=0.15),
    "crowd": Kind(8, waits=True, cancelled=0.15),
    "clan": Kind(8, waits=True, cancelled=0.25),
    "mourns": Kind(8, waits=True),
    "relapses": Kind(6, attempts=4, waits=True),
    "patient": Kind(4, waits=True),
    "awaits": Kind(6, waits=True),
    "hopeless": Kind(4, waits=True, succeeds=False, cancelled=0.5),
    "elder": Kind(6, waits=True),
    "talks": Kind(14, streams=True),
    "blurts": Kind(8, streams=True),
    "repeats": Kind(8, attempts=4, streams=True),
    "choir": Kind(8, streams=True),
    "recites": Kind(6, streams=True),
    "pooled": Kind(8, limits=True),
    "rents": Kind(10, limits=True),
    "doubles": Kind(6, limits=True),
    "lines": Kind(10, limits=True),
    "halts": Kind(6, limits=True),
    "paced": Kind(4, limits=True),
    "keeps": Kind(4, limits=True),
    "yields": Kind(5, limits=True),
    "borrows": Kind(6, limits=True),
    "dips": Kind(6, limits=True),
    "spends": Kind(4, limits=True),
    "lone": Kind(4, limits=True, dropped=True),
    "latest": Kind(4, limits=True, dropped=True),
    "houses": Kind(4, limits=True, cancelled=0.15),
    "buys": Kind(8, limits=True),
    "beats": Kind(0, planned=True),
    "pulse": Kind(0, planned=True),
    "nights": Kind(0, waits=True, streams=True, limits=True, planned=True),
    "lodger": Kind(0, limits=True),
    "leaf": Kind(0, waits=True),
    "curious": Kind(0, waits=True),
    "branch": Kind(0, waits=True),
    "mortal": Kind(0, attempts=2, deaths=frozenset({"attempts_exhausted"}), succeeds=False, waits=True),
    "lapsing": Kind(0, attempts=1, deaths=frozenset({"attempts_exhausted"}), waits=True),
    "mute": Kind(0, succeeds=False, waits=True),
}
"""Kinds by name. Those that wait, and their children, are in waiting.py and children.py, those that emit in
streaming.py, those with limits in limits.py, those with a budget in spending.py, those of schedules in planned.py."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a limit allows: tokens of all keys and of one, starts at once and seconds between two, whether in order."""

    total: int | None = None
    running: int | None = None
    burst: int = 0
    every: float = 0.0
    ordered: bool = False


BOUNDS: Final[dict[str, Bound]] = {
    "pool": Bound(total=4),
    "tenants": Bound(total=6, running=2),
    "orders": Bound(running=1, ordered=True),
    "pace": Bound(burst=4, every=0.4),
    "spend": Bound(burst=100, every=0.01),
    "seat": Bound(running=1),
    "desk": Bound(total=2),
    "lone": Bound(total=1),
    "latest": Bound(running=1),
}
"""Limits by name, as limits.py declares them."""


def drawn(mix: str) -> list[str]:
    """Return the kinds that producers draw from.

    mix: "all", "waits" for those that wait or have children, "streams" for those that emit, "limits" for those that
    hold tokens of limits, or "mixed" for all of the three.
    """
    if mix == "all":
        return [name for name, kind in KINDS.items() if kind.weight]
    wanted = ("waits", "streams", "limits") if mix == "mixed" else (mix,)
    return [name for name, kind in KINDS.items() if kind.weight and any(getattr(kind, each) for each in wanted)]
