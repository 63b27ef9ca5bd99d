"""When to look for messages that lost workers left, and where to go on looking.

The sweep runs no work and claims nothing itself: it tells the intake, which alone has slots to give, what to claim.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ...queues import Partition

__all__ = ["ReclaimSchedule"]

START = "0-0"

_LONGEST = 3.0
"""Seconds between sweeps at the most: what a lost host held is to be resumed within its lease and five seconds."""


class ReclaimSchedule:
    """The schedule of claims: all partitions at startup, then each again and again with jitter, or when asked for."""

    def __init__(self, partitions: Sequence[Partition], lease: float) -> None:
        """lease: seconds. A sweep comes each half of it, and at least every 3 s, give or take a quarter, so that
        replicas spread out.
        """
        self._interval = min(lease / 2, _LONGEST)
        self._renewal = lease / 6  # twice the time after which a beat that failed is tried again
        self._cursors = dict.fromkeys(partitions, START)
        self._unfinished: list[Partition] = list(partitions)
        self._again: set[Partition] = set()
        self._requested: set[Partition] = set(partitions)
        self._next = 0.0
        self._schedule()

    @property
    def lock_ttl(self) -> float:
        """Seconds between two sweeps of one partition by whichever worker: fewer than between two of one worker's,
        so that one whose turn it was and who died holds nobody up for long.
        """
        return self._interval / 2

    def set_partitions(self, partitions: Sequence[Partition]) -> None:
        """From now on sweep these; those that are new at the next opportunity."""
        new = [partition for partition in partitions if partition not in self._cursors]
        self._cursors = {partition: self._cursors.get(partition, START) for partition in partitions}
        self._unfinished = [*(one for one in self._unfinished if one in self._cursors), *new]
        self._requested = {partition for partition in self._requested if partition in self._cursors} | set(new)
        self._again &= self._cursors.keys()

    def request(self) -> None:
        """Claim everywhere at the next opportunity: something was given back, or may have been left."""
        self._start_round()
        self._requested = set(self._cursors)

    def postpone(self) -> None:
        """Claim nothing for a while: Redis was away, and workers that live must come to renew their leases first."""
        self._unfinished = []
        self._next = max(self._next, time.monotonic() + self._renewal)

    def until_next(self) -> float:
        """Seconds until there is something to claim; 0 for now."""
        if self._unfinished:
            return 0.0
        return max(0.0, self._next - time.monotonic())

    def next_claim(self) -> tuple[Partition, str] | None:
        """The partition to claim from now and the cursor to go on from; None when nothing is to be done yet."""
        if not self._unfinished and time.monotonic() >= self._next:
            self._start_round()
            self._schedule()
        if not self._unfinished:
            return None
        partition = self._unfinished[0]
        return partition, self._cursors[partition]

    def is_shared(self, partition: Partition) -> bool:
        """Whether this sweep is one that any worker may make, and only one has to: nobody asked for it, and it is
        about to begin.
        """
        return partition not in self._requested and self._cursors[partition] == START

    def reached(self, partition: Partition, cursor: str) -> None:
        """A claim from the partition got as far as `cursor`; '0-0' is the end of its pending list."""
        if partition not in self._cursors:
            return
        self._cursors[partition] = cursor
        if cursor == START and partition in self._again:
            self._again.discard(partition)
        elif cursor == START:
            self._unfinished = [other for other in self._unfinished if other != partition]
            self._requested.discard(partition)

    def _start_round(self) -> None:
        # A round that is under way may have passed the place: then another one, from the start, follows it.
        self._again = {partition for partition, cursor in self._cursors.items() if cursor != START}
        self._unfinished = list(self._cursors)

    def _schedule(self) -> None:
        self._next = time.monotonic() + self._interval * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
