"""Turns of the lanes: from which lane the next tasks of a worker come. Pure; used once a queue has several lanes.

Lanes are read from the highest to the lowest. So that none starves, a lane that waits gets at least one of `TURN`
starts in a row, whatever waits in the lanes above it. Idle tasks take part in no turn: they start if no other lane has
any.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Final

TURN: Final = 8
"""Starts in a row of which a lower lane that waits gets at least one."""


class LaneTurns:
    """Starts since each lane had a task, by the ranks of the lanes: 0 is the highest one."""

    def __init__(self) -> None:
        self._passed: dict[int, int] = {}

    def next(self, waiting: Collection[int]) -> tuple[int, int]:
        """Return the lane to read next and the most tasks to start from it, of lanes that may have tasks.

        If several lower lanes have waited long enough, the lowest comes first: the others wait for one start more.
        """
        due = [rank for rank in waiting if self._passed.get(rank, 0) >= TURN - 1]
        if due:
            return max(due), 1
        highest = min(waiting)
        lower = [self._passed.get(rank, 0) for rank in waiting if rank > highest]
        return highest, TURN - 1 - max(lower) if lower else sys.maxsize

    def started(self, rank: int, count: int, ranks: Collection[int]) -> None:
        """Count starts from a lane: its own wait is over, lower ones wait longer."""
        if count:
            self._passed[rank] = 0
            for lower in ranks:
                if lower > rank:
                    self._passed[lower] = self._passed.get(lower, 0) + count

    def found_empty(self, rank: int) -> None:
        """Note that a lane had no task: nothing of it waits."""
        self._passed[rank] = 0
