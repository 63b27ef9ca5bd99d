"""The version waker: makes tasks due that older workers could not run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio

from ....queues.delivery.due_set import promote_due, wake_version
from ....queues.keys import Partition
from ....queues.partitions.assignment import PartitionAssignment
from ....queues.transport.backoff import jittered
from ....queues.transport.gateway import Gateway
from ...loop_errors import LoopErrors
from ..options import WorkerTimings
from ..slots import Slots

_SOON: Final = 1.0
"""Seconds until tasks that were woken are looked for again: an older worker may have taken them."""


class VersionWaker:
    """Wakes the tasks that wait for a version that this worker has, once a minute or more often.

    An older worker that gets such a task first parks it again. So a round that woke tasks is followed by others, a
    second apart, which wake no more tasks than this worker has free slots: those that older workers take meanwhile
    cost them little. The messages of such a round are released ones, which this worker claims at once: the blocked
    reads of idle older workers would return any other. Rounds without tasks are rarer and rarer.
    """

    def __init__(
        self,
        gateway: Gateway,
        assignment: PartitionAssignment,
        versions: Mapping[str, int],
        slots: Slots,
        claim_now: Callable[[], Awaitable[None]],
        interval: float = WorkerTimings.clean_interval,
    ) -> None:
        """Create the duty; `run` runs it.

        Args:
            versions: Versions of the worker's tasks, by name.
            claim_now: Makes the worker claim released messages.
            interval: Longest time between two rounds, in seconds.
        """
        self._gateway = gateway
        self._assignment = assignment
        self._versions = versions
        self._slots = slots
        self._claim_now = claim_now
        self._interval = interval
        self._errors = LoopErrors("wake tasks of this version")

    async def run(self) -> None:
        wait, woken = _SOON, 0
        while True:
            await anyio.sleep(jittered(wait))
            try:
                woken = await self.wake(self._slots.free if woken else None)
            except Exception as error:  # noqa: BLE001 - the loop ends with the worker only
                self._errors.note(error)
            wait = _SOON if woken else min(2 * wait, self._interval)

    async def wake(self, most: int | None = None) -> int:
        """Make waiting tasks due, at most `most` in each partition, and return their number. None: all of them."""
        served = self._assignment.known
        woken = sum(await asyncio.gather(*(wake_tasks(self._gateway, one, self._versions, most) for one in served)))
        if woken and most is not None:
            await self._claim_now()
        return woken


async def wake_tasks(
    gateway: Gateway, partition: Partition, versions: Mapping[str, int], most: int | None = None
) -> int:
    """Move tasks that wait for one of these versions to the ready stream; return how many are due.

    With `most`, they are released messages, which this worker claims next. If the process dies between the two calls,
    the promoter of the partition moves them.
    """
    woken = await wake_version(gateway, partition, versions, most)
    if woken:
        await promote_due(gateway, partition, for_claim=most is not None)
    return woken
