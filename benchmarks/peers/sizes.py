"""The sizes and time limits of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "QUICK", "Amounts"]


@dataclass(frozen=True, slots=True)
class Amounts:
    """The size of a run: counts per round, times in seconds.

    tasks: no-op and echo tasks enqueued. naps: 10 ms tasks enqueued. bulk: tasks enqueued by one call. limit: how long
    a worker is measured after the first handler has started. children: of the one parent. walks: durable tasks of ten
    steps. walk_limit: the same for those. silence: the recovery timeout, for setups that let it be set. patience:
    longest default recovery timeout that is waited for.
    """

    rounds: int
    recoveries: int
    tasks: int
    naps: int
    bulk: int
    limit: float
    children: int
    walks: int
    walk_limit: float
    silence: float
    patience: float


FULL: Final = Amounts(
    rounds=5,
    recoveries=3,
    tasks=10_000,
    naps=4_000,
    bulk=20_000,
    limit=5.0,
    children=1_000,
    walks=1_000,
    walk_limit=3.0,
    silence=15.0,
    patience=75.0,
)

QUICK: Final = Amounts(
    rounds=1,
    recoveries=1,
    tasks=500,
    naps=200,
    bulk=1_000,
    limit=2.0,
    children=100,
    walks=64,
    walk_limit=1.0,
    silence=10.0,
    patience=15.0,
)
"""Only checks that everything runs; its figures are meaningless."""
