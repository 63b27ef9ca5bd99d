"""The producer's router: the partition of the next task."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ..errors import Unavailable
from ..keys import Namespace, Partition
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from .resharding import next_route, sync_route
from .route import SINGLE, Route

_ROUTE_TTL: Final = 60.0
"""Seconds for which a route is used without reading it again. A server that lost the route gets it back within this
time.
"""


class PartitionRouter:
    """The route of one queue as this producer knows it, and the partitions that have refused a task.

    A partition counts as open until it refuses. So for each key the change from one generation to the next happens at
    one instant, when one partition is closed, whatever each producer knows of the route.
    """

    def __init__(self, gateway: Gateway, namespace: Namespace, queue: str) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._queue = queue
        self._closed: set[int] = set()
        self._partitions: dict[int, Partition] = {0: namespace.partition(queue)}
        self._set_route(SINGLE)
        self._number = int(RUNTIME.token(4), 16)
        self._loaded = -math.inf

    @property
    def width(self) -> int:
        """The number of partitions that the queue is spread over now."""
        return self._route.last.count

    async def place(
        self,
        number: int | None,
        store: Callable[[Partition], Awaitable[bool]],
        find: Callable[[Sequence[Partition]], Awaitable[Partition | None]] | None = None,
    ) -> Partition:
        """Store a task; follow the route whenever its partition turns out to be closed. Return its partition.

        Args:
            number: The number of the task's key; None for a task without a key.
            store: Stores the task in a partition; returns False if that partition is closed.
            find: Looks for the task in the closed partitions that it may be in. Nothing new comes into those.
        """
        await self.refresh()
        if number is None:
            number = self.next_number()
        while True:
            if find is not None and (closed := self.closed_partitions(number)):
                found = await find(closed)
                if found is not None:
                    return found
            partition = self.partition(number)
            if await store(partition):
                return partition
            await self.on_closed([partition])

    async def refresh(self) -> None:
        """Read the route again if that was some time ago."""
        if RUNTIME.monotonic() - self._loaded > _ROUTE_TTL:
            try:
                self._set_route(await sync_route(self._gateway, self._namespace, self._queue, self._route))
            except Unavailable:
                if self._loaded == -math.inf:
                    raise
                # Routes are on one node of a cluster, partitions on others: those refuse tasks after a change.
            self._loaded = RUNTIME.monotonic()

    def next_number(self) -> int:
        """Return the number for a task without a key: consecutive numbers from a random start."""
        self._number += 1
        return self._number

    def partition(self, number: int) -> Partition:
        """Return the partition that takes tasks of this number now."""
        if self.only is not None:
            return self.only
        indexes = self._indexes(number)
        # all may be closed while another call reads the next route: the last one refuses again until then
        return self._at(next((index for index in indexes if index not in self._closed), indexes[-1]))

    def takes(self, partition: Partition) -> bool:
        """Return whether a partition of the queue takes tasks, as far as this producer knows."""
        return partition.index in self._route.last.indexes and partition.index not in self._closed

    def closed_partitions(self, number: int) -> Sequence[Partition]:
        """Return the closed partitions that took tasks of this number before."""
        if not self._closed:
            return ()
        return [self._at(index) for index in self._indexes(number) if index in self._closed]

    async def on_closed(self, partitions: Sequence[Partition]) -> None:
        """Mark partitions as closed, and read the next route."""
        for partition in partitions:
            self._closed.add(partition.index)
            if partition.index in self._route.last.indexes:
                self._set_route(await next_route(self._gateway, self._namespace, partition, self._route))
                self._loaded = RUNTIME.monotonic()

    def reopen(self, partitions: Sequence[Partition]) -> None:
        """Let partitions take tasks again: the server has lost that they were closed, and perhaps the route as well."""
        if partitions:
            self._closed.difference_update(partition.index for partition in partitions)
            self._loaded -= _ROUTE_TTL  # read the route again before the next task

    def _set_route(self, route: Route) -> None:
        """Use a route from now on. `only`: the partition of every task if the queue is not spread."""
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
