"""Moving tasks whose time has come onto the stream."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence

import anyio

from ...queues import Gateway, Partition, QueueError, promote_due
from ..observe import logger

__all__ = ["Promoter"]

_LONGEST_SLEEP = 1.0
"""Seconds after which the due sets are looked at though nothing seems to be due: a nudge may have been lost."""


class Promoter:
    """Sleeps until the next due time, or until it hears that an earlier one came up."""

    def __init__(self, gateway: Gateway, partitions: Sequence[Partition]) -> None:
        self._gateway = gateway
        self._next = dict.fromkeys(partitions, 0.0)
        self._poked = anyio.Event()

    def change(self, partitions: Sequence[Partition]) -> None:
        """From now on look at these."""
        self._next = {partition: self._next.get(partition, 0.0) for partition in partitions}
        self._poked.set()

    def poke(self, partition: Partition | None = None) -> None:
        """Look again now, everywhere or in one partition: due times have changed."""
        for one in self._next if partition is None else self._next.keys() & {partition}:
            self._next[one] = 0.0
        self._poked.set()

    async def run(self) -> None:
        while True:
            self._poked = anyio.Event()
            now = time.monotonic()
            await asyncio.gather(*(self._look(one) for one, when in self._next.items() if when <= now))
            until_next = min(self._next.values(), default=now + _LONGEST_SLEEP) - time.monotonic()
            with anyio.move_on_after(until_next):
                await self._poked.wait()

    async def _look(self, partition: Partition) -> None:
        wait: float | None = None
        self._next[partition] = math.inf  # a poke from now on asks for another look
        try:
            _, wait = await promote_due(self._gateway, partition)
        except QueueError as error:
            logger.debug("cannot promote due tasks: {}", error)
        longest = _LONGEST_SLEEP * random.uniform(0.8, 1.0)  # noqa: S311 - jitter, not a secret
        then = time.monotonic() + min(longest, longest if wait is None else wait)
        if partition in self._next:
            self._next[partition] = min(self._next[partition], then)
