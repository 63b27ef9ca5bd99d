"""Keeping up with the partitions that are this worker's: queues are spread anew, and those who share come and go."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import anyio

from ....queues import Consumer, Partition, PartitionAssignment, QueueError
from ...log import logger

__all__ = ["AssignmentWatcher"]

_INTERVAL = 2.0
"""Seconds between two looks, give or take a quarter. A nudge brings the news of a change earlier."""

_CHANGING = 0.05
"""Seconds until it is looked again whether a former generation is read to its end; the next time, twice as long."""


class AssignmentWatcher:
    """Looks where the worker's partitions are, and tells the consumer and whoever else goes through them."""

    def __init__(
        self, assignment: PartitionAssignment, consumer: Consumer, on_change: Callable[[Sequence[Partition]], None]
    ) -> None:
        """on_change: hears which partitions are served now."""
        self._assignment = assignment
        self._consumer = consumer
        self._on_change = on_change
        self._taken_from: list[Partition] = []
        self._served: list[Partition] = []
        self._woken = anyio.Event()
        self._lock = anyio.Lock()
        self.moves = 0

    def wake(self) -> None:
        """Look again now: a partition was closed."""
        self._woken.set()

    async def refresh(self) -> None:
        """One look. `moves` counts how often new messages came to be taken from elsewhere."""
        async with self._lock:
            await self._assignment.refresh()
            await self._apply()

    async def follow_changes(self) -> None:
        """See only whether a former generation was read to its end by now."""
        async with self._lock:
            await self._assignment.follow_changes()
            await self._apply()

    async def _apply(self) -> None:
        taken_from, served = self._assignment.taken_from, self._assignment.served
        if (taken_from, served) == (self._taken_from, self._served):
            return
        await self._consumer.assign(taken_from, served)
        self._on_change(served)
        self.moves += self._taken_from != taken_from
        self._taken_from, self._served = taken_from, served

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            await self._try(self.refresh)
            with anyio.move_on_after(_INTERVAL * random.uniform(0.75, 1.25)):  # noqa: S311 - jitter, not a secret
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Return when poked. Meanwhile, while a former generation is read to its end, look whether it is."""
        wait = _CHANGING
        while not self._woken.is_set():
            with anyio.move_on_after(wait if self._assignment.changing else None):
                await self._woken.wait()
                return
            await self._try(self.follow_changes)
            wait = min(wait * 2, _INTERVAL)

    async def _try(self, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
        except QueueError as error:
            logger.debug("cannot look at the queues' partitions: {}", error)
