"""The clock monitor: logs that the leases of a partition were restarted, and steps of the clock of Redis."""

from __future__ import annotations

from collections.abc import Callable

from ....queues.delivery.touch import Touch
from ....queues.keys import Partition
from ....queues.runtime import RUNTIME
from ...log import logger


class ClockMonitor:
    """Compares the clock of Redis with the monotonic clock of this process, at each touch of a partition.

    Redis restarts leases after a long gap without knowing the cause. This process does: a gap that its own clock did
    not see is a step of Redis' clock. One step or outage affects every partition, and is logged once.
    """

    def __init__(self, lease: Callable[[], float]) -> None:
        """lease: returns the seconds after which deliveries are claimed. A step of more than half of it counts."""
        self._lease = lease
        self._last: dict[Partition, Touch] = {}
        self._quiet_until = 0.0
        self.restarts_end = 0.0
        """Monotonic time at which leases that were restarted last expire, unless they are renewed; 0 before that."""

    def observe(self, partition: Partition, touch: Touch) -> None:
        """Compare a touch with the previous one of the same partition. May be called from any thread."""
        lease, before = self._lease(), self._last.get(partition)
        if touch.restarted:
            self.restarts_end = touch.received + lease
        if before is not None and touch.sent < before.sent:
            return  # a slow reply, which a later one overtook
        step = _step(before, touch)
        self._last[partition] = touch
        if abs(step) > lease / 2:
            cause = f"the clock of Redis was set {'forward' if step > 0 else 'back'} by {abs(step):.1f} s"
        elif touch.restarted:
            cause = f"no worker reached Redis for {touch.gap:.1f} s" if touch.gap else "no worker reached Redis before"
        else:
            return
        now = RUNTIME.monotonic()
        if now >= self._quiet_until:
            logger.bind(queue=partition.queue, partition=partition.index).warning(
                "{}: all leases were restarted, and the tasks of lost workers are claimed in {:g} s",
                cause,
                lease,
            )
        self._quiet_until = now + lease


def _step(before: Touch | None, touch: Touch) -> float:
    """Return by how many seconds at least the clock of Redis was set; 0 if the replies may only have been late."""
    if before is None:
        return 0.0
    passed = touch.time - before.time
    longest, shortest = touch.received - before.sent, touch.sent - before.received
    return max(0.0, passed - longest) + min(0.0, passed - shortest)
