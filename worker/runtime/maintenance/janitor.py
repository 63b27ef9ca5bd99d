"""The janitor: puts lost tasks back; removes expired dead letters, idle consumers and partitions that are not used.

It also moves values of another type out of the way, so that producers without that right find their keys again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from functools import partial
from typing import Final

import anyio

from ....deadletter.replay import trim_letters
from ....queues.delivery.consumer import Consumer
from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.delivery.lost_tasks import put_back_lost
from ....queues.inspection.timeline import trim_timeline
from ....queues.keys import Namespace
from ....queues.partitions.assignment import PartitionAssignment
from ....queues.partitions.resharding import retire_generation
from ....queues.partitions.route import Route
from ....queues.presence import present_workers
from ....queues.transport.backoff import jittered
from ....queues.transport.gateway import Gateway
from ...log import logger
from ...loop_errors import LoopErrors
from ..options import WorkerTimings
from .session_sweeper import SessionSweeper

IDLE_CONSUMER: Final = 10.0
"""Idle seconds after which the consumer of a worker that is not registered is removed.

Such a worker is presumed dead. If it is alive after all, its next read creates the consumer again.
"""


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
        session_ttl: float | None = None,
        waking: Container[str] = (),
        idle_consumer: float = IDLE_CONSUMER,
        interval: float = WorkerTimings.clean_interval,
        lock_ttl: float = WorkerTimings.clean_lock,
    ) -> None:
        """dead_letter_ttl: returns seconds. worker: its id. session_ttl: None
        without agents. waking: names of agents with `wake_when_due`. Times are in seconds.
        """
        self._gateway = gateway
        self._namespace = namespace
        self._assignment = assignment
        self._consumer = consumer
        self._dead_letter_ttl = dead_letter_ttl
        self._worker = worker
        self._sessions = (
            None
            if session_ttl is None
            else SessionSweeper(gateway, namespace, ttl=session_ttl, worker=worker, lock_ttl=lock_ttl, waking=waking)
        )
        self._errors = LoopErrors("clean up")
        self._idle_consumer = idle_consumer
        self._interval = interval
        self._lock_ttl = lock_ttl

    async def run(self) -> None:
        while True:
            await anyio.sleep(jittered(self._interval))
            await self._errors.attempt(self.clean)

    async def clean(self) -> None:
        """Load scripts that the server has lost, and clean up the partitions whose lock this worker gets."""
        await self._errors.attempt(self._gateway.load_scripts, "scripts")  # producers may not load them
        if self._sessions is not None:
            await self._errors.attempt(self._sessions.sweep, "sessions")
        locks = {partition: partition.clean_lock for partition in self._assignment.known}
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, self._lock_ttl)
        mine = [partition for partition, wait in waits.items() if not wait]
        if not mine:
            return
        present = await present_workers(self._gateway, self._namespace)
        for partition in mine:
            parts: dict[str, Callable[[], Awaitable[int]]] = {
                "keys": partial(self._gateway.set_keys_aside, partition.shared_keys),
                "lost tasks": partial(put_back_lost, self._gateway, partition, self._consumer.lease),
                "timeline": partial(trim_timeline, self._gateway, partition),
                "dead letters": partial(trim_letters, self._gateway, partition, self._dead_letter_ttl()),
                "consumers": partial(self._consumer.remove_idle_consumers, partition, self._idle_consumer, present),
            }
            for part, work in parts.items():
                await self._errors.attempt(work, f"{part} of queue {partition.queue}, partition {partition.index}")
        names = self._namespace
        shared = (*names.shared_keys, *map(names.sharing, self._assignment.routes))
        await self._errors.attempt(partial(self._gateway.set_keys_aside, shared), "keys of the namespace")
        for queue, route in self._assignment.routes.items():
            await self._errors.attempt(partial(self._retire, queue, route), f"route of queue {queue}")

    async def _retire(self, queue: str, route: Route) -> None:
        """Remove generations from the route that can have no record any more."""
        for generation in route.previous:
            if await retire_generation(self._gateway, self._namespace, queue, route, generation):
                logger.info("retired partitions {} of queue {}", list(generation.indexes), queue)
                return  # the route has changed; the next round continues
