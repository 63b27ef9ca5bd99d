"""Moving tasks whose time has come onto the stream."""

from __future__ import annotations

import random
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
        self._partitions = list(partitions)
        self._poked = anyio.Event()

    def poke(self) -> None:
        """Look again now: due times have changed."""
        self._poked.set()

    async def run(self) -> None:
        while True:
            self._poked = anyio.Event()
            wait = _LONGEST_SLEEP * random.uniform(0.8, 1.0)  # noqa: S311 - jitter, not a secret
            try:
                for partition in self._partitions:
                    _, until_next = await promote_due(self._gateway, partition)
                    if until_next is not None:
                        wait = min(wait, until_next)
            except QueueError as error:
                logger.debug("cannot promote due tasks: {}", error)
            with anyio.move_on_after(wait):
                await self._poked.wait()
