"""The sizes and time limits of the benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["FULL", "QUICK", "Amounts"]


@dataclass(frozen=True, slots=True)
class Amounts:
    """The size of a run: counts per round, times in seconds.

    tasks: no-op, echo and 10 ms tasks enqueued, where the sweep has not found how many a setup needs. swept,
    sweep_fill, sweep_limit: of a round of the sweep, the tasks enqueued, the seconds in which as many of them as
    possible are enqueued, and `limit`. bulk: tasks enqueued by one call. limit: how long a worker is measured after the
    first handler has started. children: of the one parent. walks: durable tasks of ten steps. walk_limit: the same for
    those. silence: the recovery timeout, for setups that let it be set. patience: longest default recovery timeout that
    is waited for.
    """

    rounds: int
    recoveries: int
    tasks: int
    swept: int
    sweep_fill: float
    sweep_limit: float
    bulk: int
    limit: float
    children: int
    walks: int
    walk_limit: float
    silence: float
    patience: float

    def for_rate(self, rate: float | None) -> Amounts:
        """Return the amounts for a setup whose no-op tasks per second are known: tasks for twice the time limit."""
        if rate is None:
            return self
        return replace(self, tasks=max(self.swept // 100, math.ceil(2 * rate * self.limit)))


FULL: Final = Amounts(
    rounds=3,
    recoveries=3,
    tasks=10_000,
    swept=40_000,
    sweep_fill=1.5,
    sweep_limit=2.0,
    bulk=20_000,
    limit=3.0,
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
    swept=500,
    sweep_fill=1.0,
    sweep_limit=0.5,
    bulk=1_000,
    limit=0.5,
    children=100,
    walks=64,
    walk_limit=1.0,
    silence=10.0,
    patience=15.0,
)
"""Only checks that everything runs; its figures are meaningless."""
