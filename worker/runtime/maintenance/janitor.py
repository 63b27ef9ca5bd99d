"""Keeping Redis bounded: dead letters past their retention, names of workers that are gone, partitions long left."""

from __future__ import annotations

import anyio

from ....deadletter import trim_letters
from ....queues import (
    Consumer,
    Gateway,
    Namespace,
    PartitionAssignment,
    QueueError,
    Route,
    acquire_fleet_locks,
    jittered,
    present_workers,
    retire_generation,
)
from ...log import logger

__all__ = ["Janitor"]

_INTERVAL = 60.0
_SHORTEST = 25.0
"""Seconds between two rounds of whatever workers: less than the shortest sleep of one alone."""

_GONE_FOR = 10.0
"""Seconds for which a worker that is not there has asked for nothing, before its name is removed. It was presumed dead
before; one that lives after all is put back on the list by its next read.
"""


class Janitor:
    """Sees once a minute whether another worker cleaned up lately, and does so where none did.

    A round costs as much as there are workers, so if each of them made rounds their cost would grow with the square.
    """

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        assignment: PartitionAssignment,
        consumer: Consumer,
        *,
        dead_letter_ttl: float,
        result_ttl: float,
        worker: str,
    ) -> None:
        """dead_letter_ttl, result_ttl: seconds. worker: its id."""
        self._gateway = gateway
        self._namespace = namespace
        self._assignment = assignment
        self._consumer = consumer
        self._dead_letter_ttl = dead_letter_ttl
        self._longest = max(dead_letter_ttl, result_ttl)
        self._worker = worker

    async def run(self) -> None:
        while True:
            await anyio.sleep(jittered(_INTERVAL))
            try:
                await self.clean()
            except QueueError as error:
                logger.debug("cannot clean up: {}", error)

    async def clean(self) -> None:
        """One round, over the partitions whose turn it is."""
        locks = {partition: partition.cleaning for partition in self._assignment.known}
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, _SHORTEST)
        mine = [partition for partition, wait in waits.items() if not wait]
        if not mine:
            return
        present = await present_workers(self._gateway, self._namespace)
        for partition in mine:
            await trim_letters(self._gateway, partition, self._dead_letter_ttl)
            await self._consumer.remove_idle_consumers(partition, _GONE_FOR, present)
        for queue, route in self._assignment.routes.items():
            await self._retire(queue, route)

    async def _retire(self, queue: str, route: Route) -> None:
        """Generations that have held nothing for longer than anything is kept are taken off the route."""
        for generation in route.previous:
            if await retire_generation(self._gateway, self._namespace, queue, route, generation, self._longest):
                logger.info("queue {} has left its partitions {}", queue, list(generation.indexes))
                return  # the route is another one now: the rest is for the next round
