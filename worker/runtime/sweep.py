"""When to look for messages that lost workers left, and where to go on looking.

The sweep runs no work and claims nothing itself: it tells the intake, which alone has slots to give, what to claim.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ...queues import Partition

__all__ = ["Sweep"]

START = "0-0"

_LONGEST = 3.0
"""Seconds between sweeps at the most: what a lost host held is to be resumed within its lease and five seconds."""


class Sweep:
    """The schedule of claims: all partitions at startup, then each again and again with jitter, or when asked for."""

    def __init__(self, partitions: Sequence[Partition], lease: float) -> None:
        """lease: seconds. A sweep comes each half of it, and at least every 3 s, give or take a quarter, so that
        replicas spread out.
        """
        self._interval = min(lease / 2, _LONGEST)
        self._cursors = dict.fromkeys(partitions, START)
        self._unfinished: list[Partition] = list(partitions)
        self._again: set[Partition] = set()
        self._next = 0.0
        self._schedule()

    def ask(self) -> None:
        """Claim everywhere at the next opportunity: something was given back, or may have been left."""
        # A round that is under way may have passed the place: then another one, from the start, follows it.
        self._again = {partition for partition, cursor in self._cursors.items() if cursor != START}
        self._unfinished = list(self._cursors)

    def until_next(self) -> float:
        """Seconds until there is something to claim; 0 for now."""
        if self._unfinished:
            return 0.0
        return max(0.0, self._next - time.monotonic())

    def turn(self) -> tuple[Partition, str] | None:
        """The partition to claim from now and the cursor to go on from; None when nothing is to be done yet."""
        if not self._unfinished and time.monotonic() >= self._next:
            self.ask()
            self._schedule()
        if not self._unfinished:
            return None
        partition = self._unfinished[0]
        return partition, self._cursors[partition]

    def reached(self, partition: Partition, cursor: str) -> None:
        """A claim from the partition got as far as `cursor`; '0-0' is the end of its pending list."""
        self._cursors[partition] = cursor
        if cursor == START and partition in self._again:
            self._again.discard(partition)
        elif cursor == START:
            self._unfinished = [other for other in self._unfinished if other != partition]

    def _schedule(self) -> None:
        self._next = time.monotonic() + self._interval * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
