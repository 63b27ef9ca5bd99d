"""The assignment watcher: follows changes of the partitions that this worker reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import anyio

from ....queues.delivery.consumer import Consumer
from ....queues.errors import QueueError
from ....queues.keys import Partition
from ....queues.partitions.assignment import PartitionAssignment
from ....queues.runtime import RUNTIME
from ....queues.transport.gateway import Gateway
from ...loop_errors import LoopErrors
from .janitor import wake_tasks

_INTERVAL = 2.0
"""Seconds between two checks, with a jitter of a quarter. A nudge wakes the watcher earlier."""

_CHANGING = 0.05
"""Seconds until the first check whether a closed generation is drained; doubled for each further check."""


class AssignmentWatcher:
    """Refreshes the partition assignment and passes changes to the consumer and to `on_change`."""

    def __init__(
        self,
        gateway: Gateway,
        assignment: PartitionAssignment,
        consumer: Consumer,
        on_change: Callable[[Sequence[Partition]], None],
        versions: Mapping[str, int],
    ) -> None:
        """on_change: called with the partitions that are served now. versions: of the worker's tasks, by name."""
        self._gateway = gateway
        self._assignment = assignment
        self._consumer = consumer
        self._on_change = on_change
        self._versions = versions
        self._read_from: list[Partition] = []
        self._served: list[Partition] = []
        self._errors = LoopErrors("refresh the partition assignment")
        self._woken = anyio.Event()
        self._lock = anyio.Lock()
        self.moves = 0

    @property
    def served(self) -> Sequence[Partition]:
        """The partitions that this worker serves."""
        return self._served

    def wake(self) -> None:
        """Refresh now: a partition was closed."""
        self._woken.set()

    async def refresh(self) -> None:
        """Refresh the assignment once. `moves` counts the changes of the partitions that new messages are read from."""
        async with self._lock:
            await self._assignment.refresh()
            await self._apply()

    async def follow_changes(self) -> None:
        """Check only whether closed generations are drained."""
        async with self._lock:
            await self._assignment.follow_changes()
            await self._apply()

    async def _apply(self) -> None:
        read_from, served = self._assignment.read_from, self._assignment.served
        if (read_from, served) == (self._read_from, self._served):
            return
        await self._consumer.assign(read_from, served)
        joined = [partition for partition in served if partition not in self._served]
        with suppress(QueueError):  # the version waker repeats it
            await asyncio.gather(*(wake_tasks(self._gateway, partition, self._versions) for partition in joined))
        self._on_change(served)
        self.moves += self._read_from != read_from
        self._read_from, self._served = read_from, served

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            await self._try(self.refresh)
            with anyio.move_on_after(_INTERVAL * RUNTIME.uniform(0.75, 1.25)):
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Return when woken. While a closed generation is not drained, check it meanwhile."""
        wait = _CHANGING
        while not self._woken.is_set():
            with anyio.move_on_after(wait if self._assignment.changing else None):
                await self._woken.wait()
                return
            await self._try(self.follow_changes)
            wait = min(wait * 2, _INTERVAL)

    async def _try(self, check: Callable[[], Awaitable[None]]) -> None:
        await self._errors.attempt(check)
