"""The promoter: moves due tasks to the ready stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio

from ....queues.cancellation import answer_requests
from ....queues.delivery.due_set import promote_due
from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.handle import DEFAULT_RESULT_TTL
from ....queues.keys import Partition
from ....queues.runtime import RUNTIME
from ....queues.transport.gateway import Gateway
from ...loop_errors import LoopErrors

_LONGEST_SLEEP: Final = 1.0
"""Longest sleep in seconds, because a nudge may be lost."""

_LOCK_TTL: Final = 2.5
"""TTL of the lock on a due set, in seconds: how late a due task can be if the lock holder dies."""

_TOUCH_INTERVAL: Final = 0.5
"""Shortest interval between two touches of a partition, in seconds; a check follows each retry of a task."""


class Promoter:
    """Sleeps until the next due time, or until it is woken because an earlier one was added.

    One worker watches each due set: the first one, or the one that a nudge reached. The others only check that the lock
    is held. The lock holder also touches the partition, since no other worker may: sweeps need a free slot, and
    heartbeats a running task.
    """

    def __init__(
        self,
        gateway: Gateway,
        partitions: Sequence[Partition],
        worker: str,
        touch: Callable[[Partition], Awaitable[None]],
        retention: Callable[[], float] = lambda: DEFAULT_RESULT_TTL,
    ) -> None:
        """Args:
        worker: id of this worker.
        touch: touches a partition (see `Consumer.touch`).
        retention: returns the seconds for which the record of a task is kept that a producer has cancelled.
        """
        self._gateway = gateway
        self._worker = worker
        self._touch = touch
        self._retention = retention
        self._touched: dict[Partition, float] = {}
        self._next = dict.fromkeys(partitions, 0.0)
        self._errors = LoopErrors("promote due tasks")
        self._taking_over: set[Partition] = set()
        self._woken = anyio.Event()

    def set_partitions(self, partitions: Sequence[Partition]) -> None:
        """Replace the partitions."""
        self._next = {partition: self._next.get(partition, 0.0) for partition in partitions}
        self._woken.set()

    def wake(self, partition: Partition) -> None:
        """Check a partition now: this worker added a due time."""
        if partition in self._next:
            self._next[partition] = 0.0
            self._woken.set()

    def take_over(self) -> None:
        """Check all partitions now and take over their locks.

        Only this worker received the nudge about an earlier due time.
        """
        self._next = dict.fromkeys(self._next, 0.0)
        self._taking_over = set(self._next)
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            now = RUNTIME.monotonic()
            await asyncio.gather(*(self._check(one) for one, when in self._next.items() if when <= now))
            until_next = min(self._next.values(), default=now + _LONGEST_SLEEP) - RUNTIME.monotonic()
            with anyio.move_on_after(until_next):
                await self._woken.wait()

    async def _check(self, partition: Partition) -> None:
        take_over = partition in self._taking_over
        self._taking_over.discard(partition)
        self._next[partition] = math.inf  # waking from here on asks for another check
        try:
            wait = await self._promote(partition, take_over)
        except Exception as error:  # noqa: BLE001 - the other partitions are promoted
            self._errors.note(error, f"queue {partition.queue}, partition {partition.index}")
            wait = _LONGEST_SLEEP
        if partition in self._next:
            self._next[partition] = min(self._next[partition], RUNTIME.monotonic() + wait)

    async def _promote(self, partition: Partition, take_over: bool) -> float:
        """Promote due tasks if this worker holds the lock. Return the seconds until the next check."""
        locks = {partition: partition.promote_lock}
        waits = await acquire_fleet_locks(
            self._gateway, locks, self._worker, _LOCK_TTL, renew=True, take_over=take_over
        )
        if another := waits[partition]:
            # If the lock holder dies, all others come; with jitter, most of them find a new holder.
            return another * RUNTIME.uniform(1.0, 1.2)
        _, (_, until_next) = await asyncio.gather(
            self._touch_again(partition),
            promote_due(self._gateway, partition, on_requests=partial(self._cancel, partition)),
        )  # in one round trip
        return _LONGEST_SLEEP if until_next is None else min(until_next, _LONGEST_SLEEP)

    async def _cancel(self, partition: Partition, requests: Sequence[bytes]) -> None:
        """Cancel tasks for producers, who may not. An error does not keep the due tasks waiting."""
        answer = partial(answer_requests, self._gateway, partition, requests, retention=self._retention())
        await self._errors.attempt(answer, f"requests to cancel of queue {partition.queue}")

    async def _touch_again(self, partition: Partition) -> None:
        now = RUNTIME.monotonic()
        if now - self._touched.get(partition, 0.0) >= _TOUCH_INTERVAL:
            self._touched[partition] = now
            await self._touch(partition)
