"""Keeping up with the partitions that are this worker's: queues are spread anew, and those who share come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import anyio

from ...queues import Consumer, Coverage, Partition, QueueError
from ..observe import logger

__all__ = ["Territory"]

_INTERVAL = 2.0
"""Seconds between two looks, give or take a quarter. A nudge brings the news of a change earlier."""

_CHANGING = 0.1
"""Seconds between two looks while a former generation is being read to its end."""


class Territory:
    """Looks where the worker's partitions are, and tells the consumer and whoever else goes through them."""

    def __init__(
        self, coverage: Coverage, consumer: Consumer, on_change: Callable[[Sequence[Partition]], None]
    ) -> None:
        """on_change: hears which partitions are served now."""
        self._coverage = coverage
        self._consumer = consumer
        self._on_change = on_change
        self._taken_from: list[Partition] = []
        self._served: list[Partition] = []
        self._poked = anyio.Event()
        self._turn = anyio.Lock()
        self.moves = 0

    def poke(self) -> None:
        """Look again now: a partition was closed."""
        self._poked.set()

    async def look(self) -> None:
        """One look. `moves` counts how often new messages came to be taken from elsewhere."""
        async with self._turn:
            await self._look()

    async def _look(self) -> None:
        await self._coverage.look()
        taken_from, served = self._coverage.taken_from, self._coverage.served
        if (taken_from, served) == (self._taken_from, self._served):
            return
        await self._consumer.assign(taken_from, served)
        self._on_change(served)
        self.moves += self._taken_from != taken_from
        self._taken_from, self._served = taken_from, served

    async def run(self) -> None:
        while True:
            self._poked = anyio.Event()
            try:
                await self.look()
            except QueueError as error:
                logger.debug("cannot look at the queues' partitions: {}", error)
            wait = _CHANGING if self._coverage.changing else _INTERVAL
            with anyio.move_on_after(wait * random.uniform(0.75, 1.25)):  # noqa: S311 - jitter, not a secret
                await self._poked.wait()
