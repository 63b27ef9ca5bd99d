"""Notices: tell tasks that wait for others of their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio

from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.joins import deliver_notices, sweep_notices
from ....queues.keys import Partition
from ....queues.partitions.assignment import PartitionAssignment
from ....queues.transport.backoff import jittered
from ....queues.transport.gateway import Gateway
from ...loop_errors import LoopErrors, keep_running
from ..shared_settings import WorkerTimings

_BATCH: Final = 50
"""Notices that are delivered together."""

_POLL: Final = 0.01
"""Seconds between two looks whether all batches have ended."""

_DELIVERING: Final = 4
"""Batches in progress at once: one that waits for a server that is away does not hold up the others."""


class NoticeDelivery:
    """Delivers the notices of the tasks that this worker has ended, and what dead workers have left.

    The delivery runs beside the slots: it delays no task. What cannot be delivered stays in the outbox of its
    partition, where a later round of any worker finds it.
    """

    def __init__(
        self,
        gateway: Gateway,
        assignment: PartitionAssignment,
        *,
        worker: str,
        retention: Callable[[], float],
        on_woken: Callable[[Partition, str], None],
        interval: float = WorkerTimings.notice_interval,
    ) -> None:
        """Create the duty; `run` and `sweep_all` run it.

        Args:
            worker: Id of the worker.
            retention: Returns the seconds for which the record of a child is kept that is cancelled with its parent.
            on_woken: Called with the partition and the id of a parent that is due now.
            interval: Seconds between two sweeps.
        """
        self._gateway = gateway
        self._assignment = assignment
        self._worker = worker
        self._retention = retention
        self._on_woken = on_woken
        self._interval = interval
        self._waiting: list[tuple[Partition, str]] = []
        self._given = anyio.Event()
        self._in_progress = 0
        self._errors = LoopErrors("deliver notices")

    @property
    def busy(self) -> bool:
        """Whether there is a notice that is not delivered yet."""
        return bool(self._waiting or self._in_progress)

    def give(self, partition: Partition, task_id: str) -> None:
        """Deliver the notice of a task that has ended here."""
        self._waiting.append((partition, task_id))
        self._given.set()

    async def run(self) -> None:
        """Deliver what is given."""
        async with anyio.create_task_group() as group:
            for _ in range(_DELIVERING):
                group.start_soon(keep_running, self._deliver)

    async def _deliver(self) -> None:
        while True:
            await self._given.wait()
            await self.flush()

    async def flush(self) -> None:
        """Deliver what was given until now."""
        while batch := self._waiting[:_BATCH]:
            del self._waiting[:_BATCH]
            self._in_progress += 1
            try:
                await self._errors.attempt(partial(self._deliver_batch, batch))
            finally:
                self._in_progress -= 1
        if self._given.is_set():  # the others wait for the event that is not set yet
            self._given = anyio.Event()

    async def _deliver_batch(self, batch: Sequence[tuple[Partition, str]]) -> None:
        for parent in (await deliver_notices(self._gateway, batch)).woken:
            self._on_woken(*parent)

    async def drain(self) -> None:
        """Return when everything that was given is delivered, or was tried."""
        await self.flush()
        while self.busy:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(_POLL)

    async def sweep_all(self) -> None:
        """Sweep the partitions again and again."""
        while True:
            await anyio.sleep(jittered(self._interval))
            await self._errors.attempt(self.sweep)

    async def sweep(self) -> None:
        """Do what is left in the partitions that this worker serves, unless another worker has done so recently."""
        served = self._assignment.known
        found = await self._gateway.pipeline([("EXISTS", one.outbox, one.joins) for one in served])
        locks = {one: one.notices_lock for one, exists in zip(served, found, strict=True) if exists}
        if not locks:
            return
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, self._interval * 0.7)
        mine = [partition for partition, wait in waits.items() if not wait]
        await asyncio.gather(*(self._sweep(partition) for partition in mine))

    async def _sweep(self, partition: Partition) -> None:
        sweep = partial(sweep_notices, self._gateway, partition, retention=self._retention())
        await self._errors.attempt(sweep, f"queue {partition.queue}, partition {partition.index}")
