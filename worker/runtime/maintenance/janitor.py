"""The janitor: puts lost tasks back; removes expired dead letters, idle consumers and partitions that are not used.

It also moves values of another type out of the way, so that producers without that right find their keys again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import anyio

from ....deadletter.replay import trim_letters
from ....queues.delivery.consumer import Consumer
from ....queues.delivery.due_set import promote_due, wake_version
from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.delivery.lost_tasks import put_back_lost
from ....queues.inspection.timeline import trim_timeline
from ....queues.keys import Namespace, Partition
from ....queues.partitions.assignment import PartitionAssignment
from ....queues.partitions.resharding import retire_generation
from ....queues.partitions.route import Route
from ....queues.presence import present_workers
from ....queues.transport.backoff import jittered
from ....queues.transport.gateway import Gateway
from ...log import logger
from ...loop_errors import LoopErrors
from ..shared_settings import WorkerTimings
from ..slots import Slots

IDLE_CONSUMER: Final = 10.0
"""Idle seconds after which the consumer of a worker that is not registered is removed.

Such a worker is presumed dead. If it is alive after all, its next read creates the consumer again.
"""

RUNNING: Final[WeakKeyDictionary[Janitor, asyncio.AbstractEventLoop]] = WeakKeyDictionary()
"""Janitors of this process, with their event loops: the clock of perdure.testing lets them clean up after a step."""


class Janitor:
    """Cleans up once a minute, unless another worker has done so recently.

    The cost of a round grows with the number of workers, so one worker does it for the fleet.
    """

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        assignment: PartitionAssignment,
        consumer: Consumer,
        *,
        dead_letter_ttl: Callable[[], float],
        worker: str,
        wake_paused: Callable[[Partition], Awaitable[object]],
        chores: Mapping[str, Callable[[], Awaitable[object]]] | None = None,
        idle_consumer: float = IDLE_CONSUMER,
        interval: float = WorkerTimings.clean_interval,
        lock_ttl: float = WorkerTimings.clean_lock,
    ) -> None:
        """Create the duty; `run` runs it. Times are in seconds.

        Args:
            dead_letter_ttl: returns seconds.
            worker: id of the worker.
            wake_paused: wakes the tasks of a partition that no pause holds any more.
            chores: what else it does in each round, by name.
        """
        self._gateway = gateway
        self._namespace = namespace
        self._assignment = assignment
        self._consumer = consumer
        self._dead_letter_ttl = dead_letter_ttl
        self._worker = worker
        self._wake_paused = wake_paused
        self._chores = dict(chores or {})
        self._errors = LoopErrors("clean up")
        self._idle_consumer = idle_consumer
        self._interval = interval
        self._lock_ttl = lock_ttl

    async def run(self) -> None:
        RUNNING[self] = asyncio.get_running_loop()
        try:
            while True:
                await anyio.sleep(jittered(self._interval))
                await self._errors.attempt(self.clean)
        finally:
            del RUNNING[self]

    async def clean(self) -> None:
        """Load scripts that the server has lost, and clean up the partitions whose lock this worker gets."""
        await self._errors.attempt(self._gateway.load_scripts, "scripts")  # producers may not load them
        for name, chore in self._chores.items():
            await self._errors.attempt(chore, name)
        locks = {partition: partition.clean_lock for partition in self._assignment.known}
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, self._lock_ttl)
        mine = [partition for partition, wait in waits.items() if not wait]
        if not mine:
            return
        present = await present_workers(self._gateway, self._namespace)
        for partition in mine:
            parts: dict[str, Callable[[], Awaitable[object]]] = {
                "keys": partial(self._gateway.set_keys_aside, partition.shared_keys),
                "lost tasks": partial(put_back_lost, self._gateway, partition, self._consumer.lease),
                "paused tasks": partial(self._wake_paused, partition),
                "timeline": partial(trim_timeline, self._gateway, partition),
                "dead letters": partial(trim_letters, self._gateway, partition, self._dead_letter_ttl()),
                "waits": partial(self._forget_waits, partition),
                "consumers": partial(self._consumer.remove_idle_consumers, partition, self._idle_consumer, present),
            }
            for part, work in parts.items():
                await self._errors.attempt(work, f"{part} of queue {partition.queue}, partition {partition.index}")
        names = self._namespace
        shared = (*names.shared_keys, *map(names.sharing, self._assignment.routes))
        await self._errors.attempt(partial(self._gateway.set_keys_aside, shared), "keys of the namespace")
        for queue, route in self._assignment.routes.items():
            await self._errors.attempt(partial(self._retire, queue, route), f"route of queue {queue}")

    async def _forget_waits(self, partition: Partition) -> int:
        from ....queues.waits import forget_ended_waits

        return await forget_ended_waits(self._gateway, partition)

    async def _retire(self, queue: str, route: Route) -> None:
        """Remove generations from the route that can have no record any more."""
        for generation in route.previous:
            if await retire_generation(self._gateway, self._namespace, queue, route, generation):
                logger.info("retired partitions {} of queue {}", list(generation.indexes), queue)
                return  # the route has changed; the next round continues


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
