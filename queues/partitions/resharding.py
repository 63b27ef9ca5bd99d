"""Changing over how many partitions a queue is spread, while it is used.

A change is two acts. The route gets a new generation (compare and set); then each partition of the former ones is
closed, one script each. Between the two, and whoever dies in between, the queue works as before: producers write into
what is not closed. The command closes, and so does every worker that sees a former generation, so a change that was
begun is completed. Closing twice does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from enum import IntEnum

from ..errors import Refused
from ..keys import GROUP, Namespace, Partition
from ..transport import Gateway, pairs, queue_script
from .route import SINGLE, Generation, Route, UnreadableRoute

__all__ = [
    "PartitionStatus",
    "close_previous",
    "load_route",
    "load_routes",
    "next_route",
    "partition_status",
    "retire_generation",
    "set_partitions",
    "sync_route",
]

_REROUTE = queue_script("set_route")
_CLOSE = queue_script("close_partition")
_DRAINED = queue_script("partition_status")
_RETIRE = queue_script("retire_partition")


async def load_routes(gateway: Gateway, namespace: Namespace) -> dict[str, Route]:
    """The route of every queue of the namespace, by name."""
    known = pairs(await gateway.command("HGETALL", namespace.queues))
    return {name.decode(): _decode(name.decode(), data) for name, data in sorted(known.items())}


async def load_route(gateway: Gateway, namespace: Namespace, queue: str) -> Route | None:
    """The route of a queue; None for one that nobody ever used."""
    data = await gateway.command("HGET", namespace.queues, queue)
    return None if data is None else _decode(queue, data)


async def sync_route(gateway: Gateway, namespace: Namespace, queue: str, known: Route = SINGLE) -> Route:
    """The route of a queue, with all that the caller knows of it: a new queue is made known to whoever lists queues,
    and a server that lost its memory, or a change, is told again.
    """
    while True:
        data: bytes | None = await gateway.command("HGET", namespace.queues, queue)
        joined = known if data is None else _decode(queue, data).joined(known)
        if data is not None and joined == _decode(queue, data):
            return joined
        if await gateway.run(_REROUTE, [namespace.queues], [queue, data or b"", joined.encode()]):
            return joined


async def set_partitions(gateway: Gateway, namespace: Namespace, queue: str, count: int) -> Route:
    """Spread a queue over `count` partitions from now on; returns the new route. `ValueError` for a bad count."""
    new = SINGLE.changed(count).last
    first = Route((Generation(0, new.count),))
    if await gateway.run(_REROUTE, [namespace.queues], [queue, b"", first.encode()]):
        return first  # nobody ever used it
    while True:
        route = await sync_route(gateway, namespace, queue)
        route = await _heard_of(gateway, namespace, queue, route)
        changed = route.changed(count)
        if await gateway.run(_REROUTE, [namespace.queues], [queue, route.encode(), changed.encode()]):
            await close_previous(gateway, namespace, queue, changed)
            return changed


async def _heard_of(gateway: Gateway, namespace: Namespace, queue: str, route: Route) -> Route:
    """The route with what the marks of its last generation tell: a failover may have lost what stood in the hash."""
    marks = await gateway.pipeline(
        [("HGET", namespace.partition(queue, index).closed, "route") for index in route.last.indexes]
    )
    joined = route
    for mark in marks:
        if mark is not None:
            joined = joined.joined(_decode(queue, mark))
    return route if joined == route else await sync_route(gateway, namespace, queue, joined)


async def close_previous(
    gateway: Gateway, namespace: Namespace, queue: str, route: Route, indexes: Iterable[int] | None = None
) -> None:
    """Close the partitions of all generations but the last, or those of them that `indexes` names."""
    if indexes is None:
        indexes = (index for generation in route.previous for index in generation.indexes)
    partitions = [namespace.partition(queue, index) for index in indexes]
    await asyncio.gather(*(close_partition(gateway, partition, route) for partition in partitions))


async def close_partition(gateway: Gateway, partition: Partition, route: Route) -> None:
    await gateway.run(_CLOSE, [partition.ready, partition.nudge, partition.closed], [route.encode()])


class PartitionStatus(IntEnum):
    """How far a partition has been left."""

    OPEN = -1
    CLOSED = 0
    """Producers are refused."""
    DRAINED = 1
    """And all that they put there has been delivered once."""
    EMPTY = 2
    """And nothing waits, runs or is due in it: only the replay of a dead letter brings something."""


async def partition_status(gateway: Gateway, partition: Partition) -> PartitionStatus:
    """How far a partition has been left."""
    keys = [partition.ready, partition.due, partition.closed]
    return PartitionStatus(await gateway.run(_DRAINED, keys, [GROUP]))


async def next_route(gateway: Gateway, namespace: Namespace, partition: Partition, known: Route) -> Route:
    """The route, after a partition was found closed. Raises `Refused` where nothing says how the queue goes on."""
    mark = await gateway.command("HGET", partition.closed, "route")
    if mark is not None:
        known = known.joined(_decode(partition.queue, mark))
    route = await sync_route(gateway, namespace, partition.queue, known)
    if partition.index in route.last.indexes:
        raise Refused(f"partition {partition.index} of queue {partition.queue!r} is closed, and its route has no other")
    return route


async def retire_generation(
    gateway: Gateway, namespace: Namespace, queue: str, route: Route, generation: Generation, kept: float
) -> bool:
    """Take a former generation off the route, if its partitions have held nothing for `kept` seconds."""
    partitions: Sequence[Partition] = [namespace.partition(queue, index) for index in generation.indexes]
    for partition in partitions:
        keys = [partition.ready, partition.nudge, partition.dead, partition.due, partition.closed]
        if not await gateway.run(_RETIRE, keys, [round(kept * 1000)]):
            return False
    shorter = route.without(generation)
    return bool(await gateway.run(_REROUTE, [namespace.queues], [queue, route.encode(), shorter.encode()]))


def _decode(queue: str, data: bytes) -> Route:
    try:
        return Route.decode(data)
    except UnreadableRoute as error:
        raise Refused(f"queue {queue!r}: {error}: upgrade this process") from None
