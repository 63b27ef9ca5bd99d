"""Moving tasks whose time has come onto the stream."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

import anyio

from ...queues import Gateway, Partition, QueueError, promote_due, watch_due
from ..observe import logger

__all__ = ["Promoter"]

_LONGEST_SLEEP: Final = 1.0
"""Seconds after which a due set is looked at though nothing seems to be due: a nudge may have been lost."""


class Promoter:
    """Sleeps until the next due time, or until it hears that an earlier one came up.

    Each due set is watched by one worker: the first to come, or the one that was told of an earlier due time. The
    others look after it only to see that somebody watches.
    """

    def __init__(self, gateway: Gateway, partitions: Sequence[Partition], worker: str) -> None:
        """worker: its id."""
        self._gateway = gateway
        self._worker = worker
        self._looks = dict.fromkeys(partitions, 0.0)
        self._poked = anyio.Event()

    def poke(self) -> None:
        """Look again now: due times have changed."""
        self._poked.set()

    async def run(self) -> None:
        while True:
            told, self._poked = self._poked.is_set(), anyio.Event()
            try:
                for partition, at in self._looks.items():
                    if told or at <= time.monotonic():
                        wait = await self._look(partition, told)
                        self._looks[partition] = time.monotonic() + wait
                until_next = min(self._looks.values()) - time.monotonic()
            except QueueError as error:
                logger.debug("cannot promote due tasks: {}", error)
                until_next = _LONGEST_SLEEP
            with anyio.move_on_after(max(0.0, until_next)):
                await self._poked.wait()

    async def _look(self, partition: Partition, told: bool) -> float:
        """Promote what is due, if this worker watches; returns the seconds until it is to look again."""
        another = await watch_due(self._gateway, partition, self._worker, take_over=told)
        if another:
            # Where it ends without a word, everybody who waited comes; spread out, most of them find a new watcher.
            return another * random.uniform(1.0, 1.2)  # noqa: S311 - jitter, not a secret
        _, until_next = await promote_due(self._gateway, partition)
        return _LONGEST_SLEEP if until_next is None else min(until_next, _LONGEST_SLEEP)
