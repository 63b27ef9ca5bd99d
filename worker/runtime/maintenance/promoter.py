"""Moving tasks whose time has come onto the stream."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from typing import Final

import anyio

from ....queues import Gateway, Partition, QueueError, Refused, acquire_fleet_locks, promote_due
from ...log import logger

__all__ = ["Promoter"]

_LONGEST_SLEEP: Final = 1.0
"""Seconds after which a due set is looked at though nothing seems to be due: a nudge may have been lost."""

_LOCK_TTL: Final = 2.5
"""Seconds for which a worker promotes for all without renewing its lock: how late a due task may be if it died."""


class Promoter:
    """Sleeps until the next due time, or until it hears that an earlier one came up.

    Each due set is watched by one worker: the first to come, or the one that was told of an earlier due time. The
    others look after it only to see that somebody watches.
    """

    def __init__(self, gateway: Gateway, partitions: Sequence[Partition], worker: str) -> None:
        """worker: its id."""
        self._gateway = gateway
        self._worker = worker
        self._next = dict.fromkeys(partitions, 0.0)
        self._refused = False
        self._taking_over: set[Partition] = set()
        self._woken = anyio.Event()

    def set_partitions(self, partitions: Sequence[Partition]) -> None:
        """From now on look at these."""
        self._next = {partition: self._next.get(partition, 0.0) for partition in partitions}
        self._woken.set()

    def wake(self, partition: Partition) -> None:
        """Look again now, where this worker watches: it made a task due later."""
        if partition in self._next:
            self._next[partition] = 0.0
            self._woken.set()

    def take_over(self) -> None:
        """Look again now, and be the one that watches: a nudge, which nobody else gets, told of an earlier due time."""
        self._next = dict.fromkeys(self._next, 0.0)
        self._taking_over = set(self._next)
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            now = time.monotonic()
            await asyncio.gather(*(self._check(one) for one, when in self._next.items() if when <= now))
            until_next = min(self._next.values(), default=now + _LONGEST_SLEEP) - time.monotonic()
            with anyio.move_on_after(until_next):
                await self._woken.wait()

    async def _check(self, partition: Partition) -> None:
        told = partition in self._taking_over
        self._taking_over.discard(partition)
        self._next[partition] = math.inf  # a poke from now on asks for another look
        try:
            wait = await self._promote(partition, told)
            self._refused = False
        except QueueError as error:
            # Unavailable passes, and the intake tells of it; what is refused (a right that is missing) does not.
            tell = logger.warning if isinstance(error, Refused) and not self._refused else logger.debug
            tell("cannot promote due tasks: {}", error)
            self._refused = isinstance(error, Refused)
            wait = _LONGEST_SLEEP
        if partition in self._next:
            self._next[partition] = min(self._next[partition], time.monotonic() + wait)

    async def _promote(self, partition: Partition, told: bool) -> float:
        """Promote what is due, if this worker watches; returns the seconds until it is to look again."""
        locks = {partition: partition.watch}
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, _LOCK_TTL, renew=True, take_over=told)
        if another := waits[partition]:
            # Where it ends without a word, everybody who waited comes; spread out, most of them find a new watcher.
            return another * random.uniform(1.0, 1.2)  # noqa: S311 - jitter, not a secret
        _, until_next = await promote_due(self._gateway, partition)
        return _LONGEST_SLEEP if until_next is None else min(until_next, _LONGEST_SLEEP)
