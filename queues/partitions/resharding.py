"""Resharding: a change of the number of partitions of a queue while it is used.

A change has two steps. The route gets a new generation (compare and set); then each partition of the previous ones is
closed, by one script each. Between the two steps the queue works as before: producers write into partitions that are
not closed. Every worker that sees a previous generation closes its partitions, too, so a change is completed even if
the process that started it dies. Closing is idempotent.

With the routes, in one round trip, each process reads the format of the namespace's keys, and `change`, which names
work that replaces all data: a migration or a restore. It refuses a namespace that it does not know, or that is being
changed. Such changes are made while no worker runs, since a worker reads the routes now and then only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import anyio

from ..errors import QueueError, Refused, Unavailable, WrongType
from ..junk import report_once, set_hash_aside, shown_bytes, split
from ..keys import GROUP, KEY_FORMAT, Namespace, Partition, check_name, is_name
from ..lanes import LANES, Lane
from ..runtime import RUNTIME
from ..transport.clients import is_denied
from ..transport.gateway import Gateway
from ..transport.pipelining import Command
from ..transport.scripts import pairs, queue_script
from .route import SINGLE, Generation, Route, UnreadableRoute

_SET_ROUTE = queue_script("set_route")
_CLOSE = queue_script("close_partition")
_STATUS = queue_script("partition_status")
_RETIRE = queue_script("retire_partition")

_MAX_PROBLEMS: Final = 20
"""Most foreign names of queues that a list shows."""

_OPENING: Final = 0.05
"""Seconds between two looks whether a worker has opened a partition."""

RESTORE: Final = "restore"
"""Value of `change` during a restore."""

MIGRATION: Final = "migrate"
"""Value of `change` during a migration."""

_DIGITS: Final = 9
"""Most digits of a format that are read as a number."""

_MARK_TTL: Final = 7 * 86_400_000
"""Milliseconds for which a retired partition refuses producers.

A producer reads the route again after a minute, so only one that was stopped for longer, between its read of the route
and its write, can store a task that no worker finds.
"""


class SchemaProblem(NamedTuple):
    """Reason for which a namespace cannot be used, and the remedy."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """The stored format of a namespace.

    Attributes:
        format: None if the namespace was never used, or another program wrote something else.
        change: `RESTORE`, `MIGRATION`, the name of a change that a later version knows, or empty.
    """

    format: int | None = None
    change: str = ""

    @classmethod
    def decode(cls, namespace: Namespace, stored: Any) -> StoredSchema:
        """Decode the reply to `read_command`. What another program wrote is reported once, and ignored."""
        if isinstance(stored, WrongType):
            report_once(f"the format of namespace {namespace.name!r} is ignored: {namespace.deployment}: {stored}")
            return cls()
        number, change = stored
        known = None
        if number is not None and not number.isdigit():
            report_once(
                f"the data format of namespace {namespace.name!r} is ignored: it must be a number, got {number!r}"
            )
        elif number is not None:
            known = int(number[:_DIGITS])
        return cls(known, (change or b"").decode("utf-8", "backslashreplace"))

    @property
    def shown(self) -> str:
        """The format in words."""
        known = "no data yet" if self.format is None else f"format {self.format}"
        return f"{known}, {self.change} under way" if self.change else known

    def problem(self, namespace: Namespace) -> SchemaProblem | None:
        """Return the reason for which this version cannot use the namespace; None if it can."""
        if self.change == RESTORE:
            return SchemaProblem(
                "a restore of it is under way, or was interrupted", "wait for it, or run 'perdure restore FILE' again"
            )
        if self.change == MIGRATION:
            return SchemaProblem(
                "a migration of it is under way, or was interrupted", "wait for it, or run 'perdure migrate' again"
            )
        if self.format is not None and (self.format > KEY_FORMAT or self.change):
            return SchemaProblem(
                f"its data has format {self.format}, and this version reads up to format {KEY_FORMAT}",
                "upgrade this process: pip install --upgrade perdure",
            )
        if self.format is not None and self.format < KEY_FORMAT:
            return SchemaProblem(
                f"its data has format {self.format}, and this version needs format {KEY_FORMAT}",
                "stop all workers, then run 'perdure migrate'",
            )
        return None

    def check(self, namespace: Namespace) -> None:
        """Raise `Refused` if this version cannot use the namespace."""
        problem = self.problem(namespace)
        if problem is not None:
            raise Refused(f"could not use namespace {namespace.name!r}: {problem.text}; {problem.remedy}")


def read_command(namespace: Namespace) -> Command:
    """Return the command that reads the stored format, for a pipeline."""
    return ("HMGET", namespace.deployment, "format", "change")


async def read_schema(gateway: Gateway, namespace: Namespace) -> StoredSchema:
    """Return the stored format."""
    try:
        stored = await gateway.command(*read_command(namespace))
    except WrongType as error:
        stored = error
    return StoredSchema.decode(namespace, stored)


async def load_routes(gateway: Gateway, namespace: Namespace) -> dict[str, Route]:
    """Return the routes of all queues of the namespace, by name. What another program wrote there is reported once."""
    routes, problems = await read_routes(gateway, namespace)
    for problem in problems.values():
        report_once(problem)
    return routes


class Routes(NamedTuple):
    """Routes of queues, and the problems of those that cannot be read, by name."""

    routes: dict[str, Route]
    problems: dict[str, str]


async def read_routes(gateway: Gateway, namespace: Namespace) -> Routes:
    """Return the routes of all queues of the namespace. Problems have the key's name if the key is of another type."""
    found = await _read_routes(gateway, namespace, ("HGETALL", namespace.queues))
    if isinstance(found, WrongType):
        return Routes({}, {namespace.queues: _other_type(namespace, found)})
    stored, read = pairs(found), Routes({}, {})
    names = split(stored, is_name)  # no queue has another name
    for name in sorted(names.good):
        try:
            read.routes[name] = Route.decode(stored[name.encode()])
        except UnreadableRoute as error:  # workers and producers use the first partition until they know another route
            read.routes[name] = SINGLE
            read.problems[name] = f"the route of queue {name!r} is ignored: it {error}"
    for shown in map(shown_bytes, names.bad[:_MAX_PROBLEMS]):
        read.problems[shown] = f"a field of {namespace.queues} is ignored: {shown} names no queue"
    return read


async def _read_routes(gateway: Gateway, namespace: Namespace, command: Command) -> Any:
    """Read from the hash of queues, and check the data format. Returns `WrongType` if the hash is of another type."""
    found, schema = await gateway.pipeline_each([command, read_command(namespace)], node_of=namespace.queues)
    for reply in (found, schema):
        if isinstance(reply, Refused) and not isinstance(reply, WrongType):
            raise reply
    StoredSchema.decode(namespace, schema).check(namespace)
    return found


def _other_type(namespace: Namespace, error: WrongType) -> str:
    return f"the routes of all queues are ignored: {namespace.queues}: {error}"


async def load_route(gateway: Gateway, namespace: Namespace, queue: str) -> Route | None:
    """Return the route of a queue, None if it was never used, or another program wrote it."""
    try:
        data = await gateway.command("HGET", namespace.queues, queue)
    except WrongType as error:
        report_once(_other_type(namespace, error))
        return None
    return None if data is None else _decode(queue, data)


async def sync_route(
    gateway: Gateway, namespace: Namespace, queue: str, known: Route = SINGLE, lanes: Collection[Lane] = ()
) -> Route:
    """Return the route of a queue, joined with what the caller knows, and store it if it differs.

    That registers a new queue, restores a route that a server has lost, and replaces one that another program wrote. A
    user that may only read routes leaves that to a worker of the queue. So does it with lanes: the returned route has
    only those that are stored, since workers serve no others.

    Args:
        lanes: Lanes that the route gets if it has them not. Workers are nudged, so that one of them serves a new lane
            at once, and the others from their next refresh on.

    Raises:
        ValueError: The name is not valid.
    """
    check_name("queue", queue)
    while True:
        data = await _read_routes(gateway, namespace, ("HGET", namespace.queues, queue))
        if isinstance(data, WrongType):  # the script that stores the route moves it out of the way
            report_once(_other_type(namespace, data))
            data = None
        stored = None if data is None else _decode(queue, data)
        joined = known if stored is None else stored.joined(known)
        wanted = joined
        for lane in lanes:
            wanted = wanted.with_lane(lane)
        if wanted == stored:
            return wanted
        missing = [lane for lane in wanted.lanes if lane not in joined.lanes]
        if _SET_ROUTE.name in gateway.denied:
            await _nudge(gateway, namespace, queue, joined, [f"lane:{lane}" for lane in missing])
            return joined
        try:
            stored_now = await _set_route(gateway, namespace, queue, data or b"", wanted.encode())
        except Refused as error:
            if not is_denied(error):
                raise
            gateway.denied.add(_SET_ROUTE.name)
            what = "could not register" if stored is None else "could not store the route of"
            if joined != stored:
                report_once(
                    f"{what} queue {queue!r}: {error}; its tasks wait until a worker serves it, which registers it, or "
                    f"until an operator runs 'perdure server prepare {queue}'"
                )
            await _nudge(gateway, namespace, queue, joined, [f"lane:{lane}" for lane in missing])
            return joined
        if stored_now:
            if missing and stored is not None:  # else no worker knows the queue yet
                await _nudge(gateway, namespace, queue, joined, ["route"])
            return wanted


_NUDGED: Final = 16
"""Most partitions whose workers are nudged to read the route."""


async def _nudge(gateway: Gateway, namespace: Namespace, queue: str, route: Route, causes: Sequence[str]) -> None:
    """Nudge workers of the normal lane. Only a hint: they read the route every few seconds as well."""
    partitions = [namespace.partition(queue, index) for index in route.last.indexes[:_NUDGED]]
    with suppress(QueueError):
        await asyncio.gather(
            *(
                gateway.command("XADD", partition.nudge, "MAXLEN", 16, "*", "why", cause)
                for partition in partitions
                for cause in causes
            )
        )


def wanted_lane(why: bytes) -> Lane | None:
    """Return the lane that a nudge asks for; None for any other nudge."""
    text = why.decode("utf-8", "replace")
    return next((lane for lane in LANES if text == f"lane:{lane}"), None)


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
    partitions = [namespace.partition(queue, index) for latest in route.latest for index in latest.indexes]
    marks = await gateway.pipeline_each([("HGET", partition.closed, "route") for partition in partitions])
    joined = route
    for partition, mark in zip(partitions, marks, strict=True):
        if isinstance(mark, Refused) and not isinstance(mark, WrongType):
            raise mark
        if not isinstance(mark, WrongType) and (closed_with := _route_on(partition, mark)) is not None:
            joined = joined.joined(closed_with)
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
    keys = [partition.ready, partition.due, partition.closed, partition.rings]
    return PartitionStatus(await gateway.run(_STATUS, keys, [GROUP]))


async def next_route(gateway: Gateway, namespace: Namespace, partition: Partition, known: Route) -> Route:
    """Return the route that follows a closed partition.

    If another program wrote the mark, the partition is open again, and the route is the known one. Raises `Refused` if
    no route follows, or the namespace is being changed, during which all partitions are closed.
    """
    (await read_schema(gateway, namespace)).check(namespace)
    try:
        mark = await gateway.command("HGET", partition.closed, "route")
    except WrongType:
        mark = b""
    closed_with = _route_on(partition, mark)
    route = await sync_route(
        gateway, namespace, partition.queue, known if closed_with is None else known.joined(closed_with)
    )
    if route.takes(partition.index) and not await _is_opened(gateway, partition):
        raise Refused(
            f"partition {partition.index} of queue {partition.queue!r} is closed, and its route has no next one"
        )
    return route


async def _is_opened(gateway: Gateway, partition: Partition) -> bool:
    """Open a partition that another program has closed, or wait until a worker does: a producer may lack the right."""
    try:
        return await open_again(gateway, partition)
    except Unavailable:
        raise
    except Refused:
        deadline = RUNTIME.monotonic() + gateway.patience
        while RUNTIME.monotonic() < deadline:
            if not await gateway.command("EXISTS", partition.closed):
                return True
            await anyio.sleep(_OPENING)
        raise


async def open_again(gateway: Gateway, partition: Partition) -> bool:
    """Open a partition that another program has closed. Return whether it is open."""
    if await gateway.set_keys_aside([partition.closed]):
        return True
    exists, mark = await gateway.pipeline([("EXISTS", partition.closed), ("HGET", partition.closed, "route")])
    if not exists:
        return True
    if _route_on(partition, mark) is not None:
        return False
    await set_hash_aside(gateway, partition.closed, "route", mark or b"")
    return not await gateway.command("EXISTS", partition.closed)


def _route_on(partition: Partition, mark: bytes | None) -> Route | None:
    """Return the route with which a partition was closed; None if another program wrote the mark.

    A change stores the route before it closes a partition, so each mark of Perdure has the generation that follows.
    """
    route = None if mark is None else _decode(partition.queue, mark)
    return None if route is None or route.takes(partition.index) else route


async def retire_generation(
    gateway: Gateway, namespace: Namespace, queue: str, route: Route, generation: Generation
) -> bool:
    """Remove a previous generation from the route if no record of its partitions can exist any more."""
    partitions: Sequence[Partition] = [namespace.partition(queue, index) for index in generation.indexes]
    for partition in partitions:
        streams = (partition.ready, partition.nudge, partition.dead)
        keys = [*streams, partition.due, partition.closed, partition.retentions, partition.timeline]
        keys += (partition.outbox, partition.joins, partition.rings)
        if not await gateway.run(_RETIRE, keys, [_MARK_TTL]):
            return False
    shorter = route.without(generation)
    return await _set_route(gateway, namespace, queue, route.encode(), shorter.encode())


async def _set_route(gateway: Gateway, namespace: Namespace, queue: str, known: bytes, new: bytes) -> bool:
    """Replace the route that was read, and store the data format. Return False if the route is another one by now."""
    keys = [namespace.queues, namespace.deployment]
    return bool(await gateway.run(_SET_ROUTE, keys, [queue, known, new, KEY_FORMAT]))


def _decode(queue: str, data: bytes) -> Route | None:
    """Decode a route; None, with a warning, for one that another program wrote: a later format is the namespace's."""
    try:
        return Route.decode(data)
    except UnreadableRoute as error:
        report_once(f"a route of queue {queue!r} is ignored: it {error}")
        return None
