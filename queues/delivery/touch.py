"""The touch of a partition: proof that a worker reached it, so that no lease passes while Redis is away.

Heartbeats, sweeps and the promoter touch a partition. The script that finds no touch within half a lease, or that the
clock of Redis was set, restarts every lease of the partition (`seen.lua`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..keys import GROUP, RELEASED, Partition
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from ..transport.scripts import queue_script

_TOUCH = queue_script("touch")


class Touch(NamedTuple):
    """Result of a touch, in seconds.

    Attributes:
        time: Time of Redis.
        gap: Time since the previous touch by any worker, by the clock of Redis; 0 if no touch is known.
        restarted: Number of leases that were restarted.
        sent: Monotonic time at which this worker sent the script.
        received: Monotonic time at which it had the reply.
    """

    time: float
    gap: float
    restarted: int
    sent: float
    received: float

    @classmethod
    def of(cls, reply: Sequence[int], sent: float) -> Touch:
        """Return the touch that is part of a script's reply."""
        now, gap, restarted = reply
        return cls(now / 1000, gap / 1000, restarted, sent, RUNTIME.monotonic())


OnTouch = Callable[[Partition, Touch], None]


def ignore_touch(partition: Partition, touch: Touch) -> None:
    """Do nothing with a touch."""


async def touch_partition(gateway: Gateway, partition: Partition, lease_ms: int) -> Touch:
    """Touch a partition."""
    sent = RUNTIME.monotonic()
    return Touch.of(await gateway.run(_TOUCH, [partition.ready, partition.seen], [GROUP, lease_ms, RELEASED]), sent)
