"""Resharding: a change of the number of partitions of a queue while it is used.

A change has two steps. The route gets a new generation (compare and set); then each partition of the previous ones is
closed, by one script each. Between the two steps the queue works as before: producers write into partitions that are
not closed. Every worker that sees a previous generation closes its partitions, too, so a change is completed even if
the process that started it dies. Closing is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

import orjson

from ..errors import Refused
from ..junk import report_once, shown_bytes, split
from ..keys import DATA_FORMAT, GROUP, KEY_FORMAT, Namespace, Partition, check_name, is_name
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

_SET_ROUTE = queue_script("set_route")
_CLOSE = queue_script("close_partition")
_STATUS = queue_script("partition_status")
_RETIRE = queue_script("retire_partition")

_DIGITS: Final = 9
"""Most digits of a data format that are read as a number."""

_MARK_TTL: Final = 7 * 86_400_000
"""Milliseconds for which a retired partition refuses producers.

A producer reads the route again after a minute, so only one that was stopped for longer, between its read of the route
and its write, can store a task that no worker finds.
"""


async def load_routes(gateway: Gateway, namespace: Namespace) -> dict[str, Route]:
    """Return the routes of all queues of the namespace, by name."""
    found, data_format = await gateway.pipeline(
        [("HGETALL", namespace.queues), ("HGET", namespace.deployment, "format")], node_of=namespace.queues
    )
    _check_format(namespace, data_format)
    stored, routes = pairs(found), dict[str, Route]()
    for name in sorted(split(stored, is_name).good):  # no key has another name
        data = stored[name.encode()]
        try:
            routes[name] = _decode(name, data)
        except Refused as error:  # the other queues can be read
            report_once(str(error))
    return routes


async def load_route(gateway: Gateway, namespace: Namespace, queue: str) -> Route | None:
    """Return the route of a queue, None if it was never used."""
    data = await gateway.command("HGET", namespace.queues, queue)
    return None if data is None else _decode(queue, data)


async def sync_route(gateway: Gateway, namespace: Namespace, queue: str, known: Route = SINGLE) -> Route:
    """Return the route of a queue, joined with what the caller knows, and store it if it differs.

    That registers a new queue, and restores a route that a server has lost. Raises `ValueError` for a name that is not
    valid.
    """
    check_name("queue", queue)
    while True:
        data, data_format = await gateway.pipeline(
            [("HGET", namespace.queues, queue), ("HGET", namespace.deployment, "format")], node_of=namespace.queues
        )
        _check_format(namespace, data_format)
        stored = None if data is None or _is_foreign(queue, data) else _decode(queue, data)
        joined = known if stored is None else stored.joined(known)
        if joined == stored:
            return joined
        if await _set_route(gateway, namespace, queue, data or b"", joined.encode()):
            return joined


async def set_partitions(gateway: Gateway, namespace: Namespace, queue: str, count: int) -> Route:
    """Spread a queue over `count` partitions from now on; return the new route. Raises `ValueError`."""
    new = SINGLE.changed(count).last
    first = Route((Generation(0, new.count),))
    if not await _has_tasks(gateway, namespace.partition(queue, 0)) and await _set_route(
        gateway, namespace, queue, b"", first.encode()
    ):
        return first  # the queue was never used
    while True:
        route = await sync_route(gateway, namespace, queue)
        route = await _join_marks(gateway, namespace, queue, route)
        changed = route.changed(count)
        if await _set_route(gateway, namespace, queue, route.encode(), changed.encode()):
            await close_previous(gateway, namespace, queue, changed)
            return changed


async def _has_tasks(gateway: Gateway, partition: Partition) -> bool:
    """Return whether a partition has, or lately had, tasks: the server may have lost the route of a queue in use."""
    return bool(await gateway.command("EXISTS", partition.ready, partition.due, partition.timeline))


async def _join_marks(gateway: Gateway, namespace: Namespace, queue: str, route: Route) -> Route:
    """Return the route joined with the marks of closed partitions: a failover may have lost a change of the hash."""
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
    """Close the partitions of all previous generations, or those in `indexes`."""
    if indexes is None:
        indexes = (index for generation in route.previous for index in generation.indexes)
    partitions = [namespace.partition(queue, index) for index in indexes]
    await asyncio.gather(*(close_partition(gateway, partition, route) for partition in partitions))


async def close_partition(gateway: Gateway, partition: Partition, route: Route) -> None:
    """Close one partition: from now on it refuses producers."""
    await gateway.run(_CLOSE, [partition.ready, partition.nudge, partition.closed], [route.encode()])


class PartitionStatus(IntEnum):
    """Progress of a partition from open to empty."""

    OPEN = -1
    CLOSED = 0
    """Producers are refused."""
    DRAINED = 1
    """And every message that they stored has been delivered once."""
    EMPTY = 2
    """And no task waits, runs or is due in it: only the replay of a dead letter adds one."""


async def partition_status(gateway: Gateway, partition: Partition) -> PartitionStatus:
    """Return how far a partition has been drained."""
    keys = [partition.ready, partition.due, partition.closed]
    return PartitionStatus(await gateway.run(_STATUS, keys, [GROUP]))


async def next_route(gateway: Gateway, namespace: Namespace, partition: Partition, known: Route) -> Route:
    """Return the route that follows a closed partition. Raises `Refused` if no route follows."""
    mark = await gateway.command("HGET", partition.closed, "route")
    if mark is not None:
        known = known.joined(_decode(partition.queue, mark))
    route = await sync_route(gateway, namespace, partition.queue, known)
    if partition.index in route.last.indexes:
        raise Refused(
            f"partition {partition.index} of queue {partition.queue!r} is closed, and its route has no next one"
        )
    return route


async def retire_generation(
    gateway: Gateway, namespace: Namespace, queue: str, route: Route, generation: Generation
) -> bool:
    """Remove a previous generation from the route if no record of its partitions can exist any more."""
    partitions: Sequence[Partition] = [namespace.partition(queue, index) for index in generation.indexes]
    for partition in partitions:
        streams = (partition.ready, partition.nudge, partition.dead)
        keys = [*streams, partition.due, partition.closed, partition.retentions, partition.timeline]
        if not await gateway.run(_RETIRE, keys, [_MARK_TTL]):
            return False
    shorter = route.without(generation)
    return await _set_route(gateway, namespace, queue, route.encode(), shorter.encode())


async def _set_route(gateway: Gateway, namespace: Namespace, queue: str, known: bytes, new: bytes) -> bool:
    """Replace the route that was read, and store the data format. Return False if the route is another one by now."""
    keys = [namespace.queues, namespace.deployment]
    return bool(await gateway.run(_SET_ROUTE, keys, [queue, known, new, KEY_FORMAT]))


def _check_format(namespace: Namespace, stored: bytes | None) -> None:
    """Raise `Refused` if the namespace's data has a format that this version cannot read."""
    if stored is not None and not stored.isdigit():
        report_once(f"the data format of namespace {namespace.name!r} is ignored: it must be a number, got {stored!r}")
    elif stored is not None and (len(stored) > _DIGITS or int(stored) > DATA_FORMAT):
        raise Refused(
            f"could not use namespace {namespace.name!r}: its data has format {stored.decode('utf-8', 'replace')}, "
            f"and this version reads up to format {DATA_FORMAT}; upgrade this process"
        )


def _is_foreign(queue: str, data: bytes) -> bool:
    """Return whether another program wrote a route: no version writes what is no JSON."""
    try:
        orjson.loads(data)
    except ValueError:
        report_once(f"the route of queue {queue!r} is replaced: it must be JSON, got {shown_bytes(data)}")
        return True
    return False


def _decode(queue: str, data: bytes) -> Route:
    try:
        return Route.decode(data)
    except UnreadableRoute as error:
        raise Refused(f"could not read the route of queue {queue!r}: {error}; upgrade this process") from None
