"""A producer's view of one queue: its route as last heard, which partitions have refused, and whose turn it is."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Final

from ..errors import Unavailable
from ..keys import Namespace, Partition
from ..transport import Gateway
from .resharding import next_route, sync_route
from .route import SINGLE, Route

__all__ = ["PartitionRouter"]

_BELIEVED: Final = 60.0
"""Seconds for which a route is used without looking: a server that lost it is told of it again within this time."""


class PartitionRouter:
    """Which partition the next task goes to.

    A partition is believed to be open until it refuses. So per key the change from one generation to the next is one
    instant, the closing of one partition, whatever each producer has heard.
    """

    def __init__(self, gateway: Gateway, namespace: Namespace, queue: str) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._queue = queue
        self._closed: set[int] = set()
        self._partitions: dict[int, Partition] = {0: namespace.partition(queue)}
        self._follow(SINGLE)
        self._turn = random.getrandbits(32)
        self._loaded = -math.inf

    @property
    def width(self) -> int:
        """Over how many partitions the queue is spread now."""
        return self._route.last.count

    async def refresh(self) -> None:
        """Hear of the route, if it is some time ago."""
        if time.monotonic() - self._loaded > _BELIEVED:
            try:
                self._follow(await sync_route(self._gateway, self._namespace, self._queue, self._route))
            except Unavailable:
                if self._loaded == -math.inf:
                    raise
                # Routes are on one node of a cluster, partitions on others: those say themselves when one has changed.
            self._loaded = time.monotonic()

    def next_number(self) -> int:
        """The number of a task that has no key: one after the other, from a random start."""
        self._turn += 1
        return self._turn

    def partition(self, number: int) -> Partition:
        """Where a task of this number goes now."""
        return self.only or self._at(next(index for index in self._indexes(number) if index not in self._closed))

    def closed_partitions(self, number: int) -> Sequence[Partition]:
        """The closed partitions where tasks of this number went before."""
        if not self._closed:
            return ()
        return [self._at(index) for index in self._indexes(number) if index in self._closed]

    async def on_closed(self, partitions: Sequence[Partition]) -> None:
        """Partitions were found closed: hear of those that come after them."""
        for partition in partitions:
            self._closed.add(partition.index)
            if partition.index in self._route.last.indexes:
                self._follow(await next_route(self._gateway, self._namespace, partition, self._route))
                self._loaded = time.monotonic()

    def _follow(self, route: Route) -> None:
        """The route is this one now. only: where every task goes in a queue that is not spread."""
        self._route = route
        single = len(route.generations) == 1 and route.last.count == 1
        self.only: Partition | None = self._at(route.last.first) if single else None

    def _indexes(self, number: int) -> Sequence[int]:
        return [generation.index_of(number) for generation in self._route.generations]

    def _at(self, index: int) -> Partition:
        found = self._partitions.get(index)
        if found is None:
            found = self._partitions[index] = self._namespace.partition(self._queue, index)
        return found
