"""The schedule of claims: when to claim messages that lost workers left pending, and from which cursor.

The schedule claims nothing itself. The intake loop, which knows the free slots, asks it what to claim next.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...queues.keys import Partition
from ...queues.lanes import IDLE, lane_rank
from ...queues.runtime import RUNTIME
from .shared_settings import WorkerTimings

START = "0-0"


class ReclaimSchedule:
    """Order and times of claims: every partition at start-up, then periodically with jitter, or on request."""

    def __init__(
        self, partitions: Sequence[Partition], lease: float, max_interval: float = WorkerTimings.sweep_interval
    ) -> None:
        """Schedule the first sweep for now.

        Args:
            partitions: The partitions to sweep.
            lease: Seconds. The interval is a quarter of it, with a jitter of a quarter, so that the sweeps of several
                workers spread out. If a worker dies, the next sweep of another one comes within half a lease: a longer
                gap restarts all leases (see queues/lua/seen.lua).
            max_interval: Upper bound of the interval, in seconds.
        """
        self._max_interval = max_interval
        self.set_lease(lease)
        self._cursors = dict.fromkeys(_by_lane(partitions), START)
        self._unfinished: list[Partition] = list(self._cursors)
        self._again: set[Partition] = set()
        self._requested: set[Partition] = set(partitions)
        self._next = 0.0
        self._schedule()

    @property
    def lock_ttl(self) -> float:
        """TTL of the lock on a sweep, in seconds.

        It is shorter than the interval of one worker, so that a lock holder that dies delays the others only briefly.
        """
        return self._interval / 2

    def set_lease(self, lease: float) -> None:
        """Use another lease, in seconds, from the next sweep on."""
        self._interval = min(lease / 4, self._max_interval)

    def set_partitions(self, partitions: Sequence[Partition]) -> None:
        """Replace the partitions; new ones are swept at the next opportunity."""
        new = [partition for partition in partitions if partition not in self._cursors]
        self._cursors = {partition: self._cursors.get(partition, START) for partition in _by_lane(partitions)}
        self._unfinished = _by_lane([*(one for one in self._unfinished if one in self._cursors), *new])
        self._requested = {partition for partition in self._requested if partition in self._cursors} | set(new)
        self._again &= self._cursors.keys()

    def request(self) -> None:
        """Schedule a sweep of all partitions now: messages were released or may have been left."""
        self._start_round()
        self._requested = set(self._cursors)

    def until_next(self, *, spare: bool = True) -> float:
        """Return the seconds until the next claim, 0 if one is due. spare: whether idle tasks may start."""
        if self._first(spare) is not None:
            return 0.0
        return max(0.0, self._next - RUNTIME.monotonic())

    def next_claim(self, *, spare: bool = True) -> tuple[Partition, str] | None:
        """Return the partition to claim from and the cursor to continue at, or None if no claim is due.

        spare: whether idle tasks may start; else their lane waits.
        """
        if self._first(spare) is None and RUNTIME.monotonic() >= self._next:
            self._start_round()
            self._schedule()
        partition = self._first(spare)
        return None if partition is None else (partition, self._cursors[partition])

    def _first(self, spare: bool) -> Partition | None:
        return next((one for one in self._unfinished if spare or one.lane != IDLE), None)

    def is_shared(self, partition: Partition) -> bool:
        """Return whether one worker of the fleet is enough for this sweep.

        True for a periodic sweep at its start, False for one that was requested.
        """
        return partition not in self._requested and self._cursors[partition] == START

    def reached(self, partition: Partition, cursor: str) -> None:
        """Record the cursor that a claim returned; '0-0' is the end of the pending list."""
        if partition not in self._cursors:
            return
        self._cursors[partition] = cursor
        if cursor == START and partition in self._again:
            self._again.discard(partition)
        elif cursor == START:
            self._unfinished = [other for other in self._unfinished if other != partition]
            self._requested.discard(partition)

    def _start_round(self) -> None:
        # A sweep in progress may have passed the messages in question, so a second one follows it.
        self._again = {partition for partition, cursor in self._cursors.items() if cursor != START}
        self._unfinished = list(self._cursors)

    def _schedule(self) -> None:
        self._next = RUNTIME.monotonic() + self._interval * RUNTIME.uniform(0.75, 1.25)


def _by_lane(partitions: Sequence[Partition]) -> list[Partition]:
    """Return partitions in the order of their lanes, the highest first."""
    return sorted(partitions, key=lambda partition: lane_rank(partition.index))
