"""Keeping Redis bounded: dead letters past their retention, and names of workers that are gone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio

from ...deadletter import trim_letters
from ...queues import Consumer, Gateway, Namespace, Partition, QueueError, list_workers
from ..observe import logger

__all__ = ["Janitor"]

_INTERVAL = 60.0
_GONE_FOR = 60.0


class Janitor:
    """Cleans up once a minute."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        partitions: Sequence[Partition],
        consumer: Consumer,
        dead_letter_ttl: float,
    ) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._partitions = list(partitions)
        self._consumer = consumer
        self._dead_letter_ttl = dead_letter_ttl

    async def run(self) -> None:
        while True:
            await anyio.sleep(_INTERVAL * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            try:
                await self.clean()
            except QueueError as error:
                logger.debug("cannot clean up: {}", error)

    async def clean(self) -> None:
        """One round."""
        present = {worker.id for worker in await list_workers(self._gateway, self._namespace)}
        for partition in self._partitions:
            await trim_letters(self._gateway, partition, self._dead_letter_ttl)
            await self._consumer.forget(partition, _GONE_FOR, present)
