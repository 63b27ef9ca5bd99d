"""The producer's router: the partition of the next task, in each lane of a queue."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ..errors import Unavailable
from ..junk import report_once
from ..keys import Namespace, Partition
from ..lanes import NORMAL, Lane
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from .resharding import next_route, sync_route
from .route import SINGLE, Route

_ROUTE_TTL: Final = 60.0
"""Seconds for which a route is used without reading it again. A server that lost the route gets it back within this
time.
"""

_LANE_TTL: Final = 2.0
"""The same while a lane is missing that this user may not add to the route: a worker adds it when it is nudged."""


class PartitionRouter:
    """The route of a lane of one queue as this producer knows it, and the partitions that have refused a task.

    A partition counts as open until it refuses. So for each key the change from one generation to the next happens at
    one instant, when one partition is closed, whatever each producer knows of the route.
    """

    def __init__(self, gateway: Gateway, namespace: Namespace, queue: str, lane: Lane = NORMAL) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._queue = queue
        self._lane: Lane = lane
        self._lanes: dict[Lane, PartitionRouter] = {lane: self}
        self._closed: set[int] = set()
        self._partitions: dict[int, Partition] = {0: namespace.partition(queue)}
        self._set_route(SINGLE)
        self._number = int(RUNTIME.token(4), 16)
        self._loaded = -math.inf

    def of(self, lane: Lane) -> PartitionRouter:
        """Return the router of another lane of the same queue. The first task adds the lane to the route."""
        found = self._lanes.get(lane)
        if found is None:
            found = self._lanes[lane] = PartitionRouter(self._gateway, self._namespace, self._queue, lane)
        return found

    @property
    def width(self) -> int:
        """The number of partitions that the queue is spread over now."""
        return self._route.last.count

    @property
    def partitions(self) -> list[Partition]:
        """All partitions of the queue that may hold tasks."""
        return [self._at(index) for index in self._route.indexes]

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
            find: Looks for the task in other partitions that it may be in: closed ones, into which nothing new comes,
                and those of other lanes.
        """
        await self.refresh()
        if number is None:
            number = self.next_number()
        while True:
            if find is not None and (others := self.other_partitions(number)):
                found = await find(others)
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
                await self._sync()
            except Unavailable:
                if self._loaded == -math.inf:
                    raise
                # Routes are on one node of a cluster, partitions on others: those refuse tasks after a change.
                self._loaded = RUNTIME.monotonic()

    async def _sync(self) -> None:
        """Read the route, with the lane. Until a worker has added a lane, its tasks go to the normal one."""
        lanes: tuple[Lane, ...] = () if self._lane == NORMAL else (self._lane,)
        route = await sync_route(self._gateway, self._namespace, self._queue, self._whole, lanes)
        self._set_route(route)
        self._loaded = RUNTIME.monotonic()
        if self._lane not in route.lanes:
            self._loaded -= _ROUTE_TTL - _LANE_TTL
            report_once(
                f"tasks of queue {self._queue!r} with the lane {self._lane!r} are enqueued as normal ones: this Redis "
                "user may not add the lane to the queue; a worker adds it when it reads the queue next, or an operator "
                f"with 'perdure server prepare {self._queue} --lane {self._lane}'"
            )

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

    def is_closed(self, partition: Partition) -> bool:
        """Return whether a partition of the lane has refused a task."""
        return partition.index in self._closed

    def closed_partitions(self, number: int) -> Sequence[Partition]:
        """Return the closed partitions of the lane that took tasks of this number before."""
        if not self._closed:
            return ()
        return [self._at(index) for index in self._indexes(number) if index in self._closed]

    @property
    def shares_ids(self) -> bool:
        """Whether a task of an id may be in another lane of the queue."""
        return bool(self._others)

    def other_partitions(self, number: int) -> Sequence[Partition]:
        """Return the other partitions that may have a task of this number: closed ones, and those of other lanes."""
        others = [self._at(generation.index_of(number)) for generation in self._others]
        return [*self.closed_partitions(number), *others]

    async def on_closed(self, partitions: Sequence[Partition]) -> None:
        """Mark partitions as closed, and read the next route."""
        for partition in partitions:
            if partition.index not in self._route.last.indexes:
                self._closed.add(partition.index)
                continue
            route = await next_route(self._gateway, self._namespace, partition, self._whole)  # may be refused
            self._closed.add(partition.index)
            self._set_route(route)
            self._loaded = RUNTIME.monotonic()

    def reopen(self, partitions: Sequence[Partition]) -> None:
        """Let partitions take tasks again: the server has lost that they were closed, and perhaps the route as well."""
        if lost := self._closed.intersection(partition.index for partition in partitions):
            self._closed -= lost
            self._loaded -= _ROUTE_TTL  # read the route again before the next task

    def _set_route(self, route: Route) -> None:
        """Use a route from now on. `only`: the partition of every task if the queue is not spread."""
        self._whole = route
        self._route = route.of(self._lane) or route.of(NORMAL) or route
        used = self._route.generations
        self._others = () if self._route is route else tuple(one for one in route.generations if one not in used)
        single = len(used) == 1 and self._route.last.count == 1
        self.only: Partition | None = self._at(self._route.last.first) if single else None

    def _indexes(self, number: int) -> Sequence[int]:
        return [generation.index_of(number) for generation in self._route.generations]

    def _at(self, index: int) -> Partition:
        found = self._partitions.get(index)
        if found is None:
            found = self._partitions[index] = self._namespace.partition(self._queue, index)
        return found
