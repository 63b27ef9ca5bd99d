"""Read-only views: queues in numbers, lists of tasks, saved fields of checkpoints.

The workers of a namespace, and what they hold: blocked ones, and lost ones whose tasks others have resumed.

A worker registers from its event loop, and renews its leases from a thread. So one that does the second only is
blocked by the code of a task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..envelope import check_task_id
from ..errors import Refused
from ..keys import GROUP, RELEASED, SUSPECTS, Namespace, Partition, TaskKey, belongs_to, with_tenant
from ..lanes import Lane, lane_of, lane_rank
from ..partitions.resharding import load_routes, read_routes
from ..partitions.route import Route
from ..presence import WorkerInfo, list_workers, total_rates
from ..records import Record, State, read_tasks
from ..transport.clients import is_missing_group
from ..transport.gateway import Gateway
from ..transport.large_values import LINKS, linked_object
from ..transport.pipelining import Command
from ..transport.scripts import milliseconds, pairs, queue_script

_COUNT_LIMITED = queue_script("count_limited")

_MAX_KEYS: Final = 10_000
"""Keys of limits whose waiting tasks are counted in one partition: some 5 ms of the server's time."""

_CONCURRENT: Final = 64
"""Partitions that are read at the same time."""


_OF_A_PARTITION = ("depth", "in_flight", "due", "dead", "oldest_age", "limited", "held", "overdue")


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue, or one of its partitions, in numbers.

    Attributes:
        depth: Messages that no worker holds.
        in_flight: Messages that a worker holds.
        due: Scheduled tasks.
        limited: Tasks that wait for limits; a lower bound where they have more than 10,000 keys.
        held: Scheduled tasks that pauses of operators hold.
        overdue: Seconds since the earliest of `due` has come; 0 if none has. A worker queues it within a second.
        dead: Dead letters.
        oldest_age: Seconds that the oldest message of `depth` has waited, None if there is no such message.
        consumers: Names in the consumer group, with the number of their messages. A dead worker stays for a while.
        index: The partition; None for the whole queue, whose partitions are in `partitions`.
        rate: Deliveries that all workers settle per second. It is measured by queue: None for one partition.
        workers: Registered workers of the queue that are not presumed dead, idle ones included. None for one partition.
        pause: The pause of the whole queue as plain data; None without one, and for one partition.
    """

    queue: str
    depth: int
    in_flight: int
    due: int
    dead: int
    oldest_age: float | None
    consumers: dict[str, int]
    index: int | None = None
    partitions: tuple[QueueStats, ...] = ()
    rate: float | None = None
    workers: int | None = None
    problem: str = ""
    limited: int = 0
    held: int = 0
    overdue: float = 0.0
    pause: Mapping[str, Any] | None = None

    @property
    def lanes(self) -> dict[Lane, QueueStats]:
        """The numbers of each lane that was ever used, the highest first; empty for one partition."""
        found: dict[Lane, list[QueueStats]] = {}
        for stats in sorted(self.partitions, key=lambda one: lane_rank(one.index or 0)):
            found.setdefault(lane_of(stats.index or 0), []).append(stats)
        return {lane: _sum(partitions) for lane, partitions in found.items()}

    @property
    def drain_time(self) -> float | None:
        """Seconds until no task waits or runs, at the current rate and without new tasks.

        0 if no task waits or runs; None if tasks do, and none is being settled.
        """
        remaining = self.depth + self.in_flight + self.limited
        if not remaining:
            return 0.0
        return remaining / self.rate if self.rate else None

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        shown = asdict(self) | {"drain_time": self.drain_time}
        del shown["index"]
        if not self.problem:
            del shown["problem"]
        shown["partitions"] = [
            {"index": one.index, **{name: value for name, value in asdict(one).items() if name in _OF_A_PARTITION}}
            for one in self.partitions
        ]
        shown["lanes"] = {
            lane: {name: value for name, value in asdict(stats).items() if name in _OF_A_PARTITION}
            for lane, stats in self.lanes.items()
        }
        return shown


async def queue_partitions(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> list[Partition]:
    """Return the partitions of one queue, or of all queues: all partitions that may hold anything."""
    return _partitions(namespace, await load_routes(gateway, namespace), queue)


def _partitions(namespace: Namespace, routes: Mapping[str, Route], queue: str | None) -> list[Partition]:
    return [
        namespace.partition(name, index)
        for name, route in routes.items()
        if queue in (None, name)
        for index in route.indexes
    ]


async def find_task(gateway: Gateway, namespace: Namespace, task_id: str, queue: str | None = None) -> Partition | None:
    """Return the partition of a task, None if no queue has it. See `find_tasks`."""
    return next(iter(await find_tasks(gateway, namespace, task_id, queue)), None)


async def find_tasks(gateway: Gateway, namespace: Namespace, task_id: str, queue: str | None = None) -> list[Partition]:
    """Return the partitions that have a task of this id, one for each queue that has one, or only that of one queue.

    An id without a tenant is one of the namespace's. No queue has a task of another tenant.

    Raises `ValueError` for an invalid id.
    """
    check_task_id(task_id)
    try:
        task_id = with_tenant(namespace.tenant, task_id)
    except ValueError:  # of another tenant
        return []
    candidates = await queue_partitions(gateway, namespace, queue)
    found = await gateway.pipeline([("EXISTS", candidate.record(task_id)) for candidate in candidates])
    return [candidate for candidate, exists in zip(candidates, found, strict=True) if exists]


async def list_queues(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> list[QueueStats]:
    """Return the numbers of one queue, or of all queues by name, with those of their partitions.

    What another program wrote among the routes is a queue with a problem. The cost depends on the number of partitions
    and workers, not on the number of messages.
    """
    routes, problems = await read_routes(gateway, namespace)
    found = await _all_stats(gateway, _partitions(namespace, routes, queue))
    queues: dict[str, list[QueueStats]] = {}
    for stats in found:
        queues.setdefault(stats.queue, []).append(stats)
    present = [worker for worker in await list_workers(gateway, namespace) if not worker.presumed_dead]
    paused = await _paused_queues(gateway, namespace)
    rates = total_rates(present)
    serving = Counter(name for worker in present for name in set(worker.queues))
    listed = []
    for name, partitions in queues.items():
        total = replace(_sum(partitions), rate=rates.get(name, 0.0), workers=serving[name], pause=paused.get(name))
        if (problem := problems.pop(name, None)) is not None:
            total = replace(total, problem="; ".join(filter(None, (problem, total.problem))))
        listed.append(total)
    listed += [_damaged(name, problem) for name, problem in problems.items() if queue in (None, name)]
    return listed


async def _paused_queues(gateway: Gateway, namespace: Namespace) -> dict[str, Mapping[str, Any]]:
    """Return the pauses of whole queues as plain data; none if this user may not read them."""
    from ..pauses import load_pauses  # a plain task needs none of it

    try:
        found = await load_pauses(gateway, namespace)
    except Refused:
        return {}
    return {queue: rule.summary() for queue, rule in found.queues.items()}


def _damaged(name: str, problem: str) -> QueueStats:
    """Return a queue whose name or route another program wrote."""
    return QueueStats(name, 0, 0, 0, 0, None, {}, rate=0.0, workers=0, problem=problem)


async def _all_stats(gateway: Gateway, partitions: Sequence[Partition]) -> list[QueueStats]:
    found: list[QueueStats] = []
    for start in range(0, len(partitions), _CONCURRENT):
        some = partitions[start : start + _CONCURRENT]
        found += await asyncio.gather(*(partition_stats(gateway, partition) for partition in some))
    return found


async def partition_stats(gateway: Gateway, partition: Partition) -> QueueStats:
    """Return the numbers of one partition."""
    counts: list[Command] = [
        ("XLEN", partition.ready),
        ("ZCARD", partition.due),
        ("XLEN", partition.dead),
        ("ZCARD", partition.rings),
        ("ZCARD", partition.paused),
        ("ZRANGE", partition.due, 0, 0, "WITHSCORES"),
        ("TIME",),
    ]
    readers: list[Command] = [("XINFO", "GROUPS", partition.ready), ("XINFO", "CONSUMERS", partition.ready, GROUP)]
    node = partition.ready
    try:  # in one pipeline, so that a message that is read or settled meanwhile is counted once
        *found, first, time, groups, consumers = await gateway.pipeline([*counts, *readers], node_of=node)
    except Refused:  # no stream or no group yet: nothing was ever read
        *found, first, time = await gateway.pipeline_each(counts, node_of=node)
        groups, consumers = [], []
    refused = [str(count) for count in found if isinstance(count, Refused)]  # of another type
    length, due, dead, rings, held = (count if isinstance(count, int) else 0 for count in found)
    limited = await _count_limited(gateway, partition) if rings else 0
    each = [_mapping(consumer) for consumer in consumers]
    taken = {consumer[b"name"].decode("utf-8", "backslashreplace"): consumer[b"pending"] for consumer in each}
    waiting = [name for name in (RELEASED, SUSPECTS) if taken.pop(name, 0)]
    in_flight = sum(taken.values())
    now_ms = milliseconds(time)
    oldest = None if refused else await _oldest_waiting(gateway, partition, groups, waiting)
    return QueueStats(
        queue=partition.queue,
        depth=max(0, length - in_flight),  # a message that was deleted by hand may still be pending
        in_flight=in_flight,
        due=due,
        dead=dead,
        oldest_age=None if oldest is None else max(0.0, (now_ms - oldest) / 1000),
        consumers=taken,
        index=partition.index,
        problem="; ".join(refused),
        limited=limited,
        held=held,
        overdue=_overdue(first, now_ms),
    )


def _overdue(first: Any, now_ms: int) -> float:
    """Return the seconds since the due time of the first entry of a set, 0 if it has not come.

    A time of 0 asks for the next round, and does not say since when: then 1.

    first: the reply of ZRANGE WITHSCORES.
    """
    score = float(first[1]) if isinstance(first, list) and first else now_ms
    return max(0.0, (now_ms - score) / 1000) if score > 0 else 1.0


async def overdue_schedules(gateway: Gateway, namespace: Namespace) -> float:
    """Return the seconds since the time of the earliest schedule has come, 0 if none has.

    A worker fires it within a second, so a larger number means that no worker runs.
    """
    first, time = await gateway.pipeline_each(
        [("ZRANGE", namespace.schedules, 0, 0, "WITHSCORES"), ("TIME",)], node_of=namespace.schedules
    )
    return _overdue(first, milliseconds(time))


async def _count_limited(gateway: Gateway, partition: Partition) -> int:
    try:
        found: int = await gateway.run(_COUNT_LIMITED, [partition.rings], [_MAX_KEYS])
    except Refused:  # a key of another type, or this user may not run scripts
        return 0
    return found


async def _oldest_waiting(
    gateway: Gateway, partition: Partition, groups: Sequence[Sequence[Any]], waiting: Sequence[str]
) -> int | None:
    """Return the time of the oldest message that no worker holds, in milliseconds: the first part of its id."""
    last_read = next((group[b"last-delivered-id"] for group in map(_mapping, groups)), b"0-0")
    (found,) = await gateway.pipeline_each([("XRANGE", partition.ready, b"(" + last_read, "+", "COUNT", 1)])
    ids = [] if isinstance(found, Refused) else [entry for entry, _ in found]  # refused: no id is larger
    for name in waiting:
        first = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1, name)
        ids += [entry for entry, *_ in first]
    return min((int(entry.partition(b"-")[0]) for entry in ids), default=None)


def _mapping(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _sum(partitions: Sequence[QueueStats]) -> QueueStats:
    """Return the numbers of a queue from those of its partitions."""
    consumers: dict[str, int] = {}
    for one in partitions:
        for name, held in one.consumers.items():
            consumers[name] = consumers.get(name, 0) + held
    return replace(
        partitions[0],
        depth=sum(one.depth for one in partitions),
        in_flight=sum(one.in_flight for one in partitions),
        due=sum(one.due for one in partitions),
        limited=sum(one.limited for one in partitions),
        held=sum(one.held for one in partitions),
        overdue=max(partition.overdue for partition in partitions),
        dead=sum(one.dead for one in partitions),
        oldest_age=max((one.oldest_age for one in partitions if one.oldest_age is not None), default=None),
        consumers=consumers,
        index=None,
        problem="; ".join(f"partition {one.index}: {one.problem}" for one in partitions if one.problem),
        partitions=tuple(partitions),
    )


async def list_tasks(
    gateway: Gateway,
    namespace: Namespace,
    *,
    queue: str | None = None,
    partition: Partition | None = None,
    states: Sequence[State] = (),
    task: str | None = None,
) -> AsyncIterator[Record]:
    """Yield the records of tasks in no particular order. Uses SCAN, which does bounded work per call."""
    if partition is None:
        partitions = await queue_partitions(gateway, namespace, queue)
        scans = _scans(gateway, namespace, queue, partitions, "record")
    else:
        scans = [(partition.task_keys("record"), [partition], partition.ready if gateway.clustered else None)]
    for pattern, only, node in scans:
        async for keys in _scan(gateway, pattern, node):
            for where, ids in _by_partition({one.record(""): one for one in only}, keys).items():
                own = [task_id for task_id in ids if belongs_to(namespace.tenant, task_id)]
                for record in await read_tasks(gateway, where, own):
                    if record is not None and (not states or record.state in states) and task in (None, record.task):
                        yield record


def _scans(
    gateway: Gateway, namespace: Namespace, queue: str | None, partitions: Sequence[Partition], kind: TaskKey
) -> list[tuple[str, Sequence[Partition], str | None]]:
    """Return the SCANs to run: pattern, partitions, key of the node. One, or one per partition in a cluster."""
    if not gateway.clustered:
        return [(namespace.task_keys(kind, queue), partitions, None)] if partitions else []
    return [(partition.task_keys(kind), [partition], partition.ready) for partition in partitions]


async def _scan(gateway: Gateway, pattern: str, node: str | None, kind: str = "hash") -> AsyncIterator[Sequence[bytes]]:
    """Yield the keys of one SCAN, page by page. kind: the type of the keys in Redis."""
    cursor = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE, "TYPE", kind)
        cursor, keys = await gateway.command(*scan, node_of=node)
        yield keys
        if cursor == b"0":
            return


def _by_partition(known: Mapping[str, Partition], keys: Sequence[bytes]) -> dict[Partition, list[str]]:
    """Return the ids in keys by partition, without other partitions. known: partitions by the start of their keys."""
    found: dict[Partition, list[str]] = {}
    for key in keys:
        head, colon, task_id = key.decode("utf-8", "replace").rpartition(":")
        if (partition := known.get(head + colon)) is not None:
            found.setdefault(partition, []).append(task_id)
    return found


_PAGE: Final = 500
"""Keys, and fields of a hash, that are read at once."""


async def checkpoint_fields(gateway: Gateway, partition: Partition, task_id: str, prefix: str) -> dict[str, bytes]:
    """Return the saved fields of a task whose names start with a prefix. Raises `DecryptionError`."""
    found = await _fields(gateway, [partition.steps(task_id)], f"s:{prefix}*")
    return _decrypted(gateway, partition, task_id, found[partition.steps(task_id)])


async def checkpoint_fields_of_all(
    gateway: Gateway, namespace: Namespace, prefix: str
) -> AsyncIterator[tuple[Partition, str, dict[str, bytes]]]:
    """Yield partition, id and saved fields with a prefix of every task that has a checkpoint.

    Uses SCAN: a task that exists during the whole call is found, and may be found twice. Raises `DecryptionError`.
    """
    partitions = await queue_partitions(gateway, namespace)
    for pattern, only, node in _scans(gateway, namespace, None, partitions, "steps"):
        known = {partition.steps(""): partition for partition in only}
        async for keys in _scan(gateway, pattern, node):
            for key, saved in (await _fields(gateway, [key.decode() for key in keys], f"s:{prefix}*")).items():
                head, colon, task_id = key.rpartition(":")
                if (partition := known.get(head + colon)) is not None:
                    yield partition, task_id, _decrypted(gateway, partition, task_id, saved)


async def task_logs(
    gateway: Gateway, namespace: Namespace, queue: str | None = None
) -> AsyncIterator[tuple[Partition, str]]:
    """Yield partition and id of every task that has an event log.

    Uses SCAN: a task that exists during the whole call is found, and may be found twice.
    """
    partitions = await queue_partitions(gateway, namespace, queue)
    for pattern, only, node in _scans(gateway, namespace, queue, partitions, "log"):
        async for keys in _scan(gateway, pattern, node, "stream"):
            for partition, ids in _by_partition({one.log(""): one for one in only}, keys).items():
                for task_id in ids:
                    yield partition, task_id


async def linked_objects(gateway: Gateway, namespace: Namespace) -> AsyncIterator[str]:
    """Yield the names of the objects of the value store that large values of tasks are. Uses SCAN; may repeat a name.

    An upload links its object for some minutes only, and became that of a task or of none when those are over.
    """
    partitions = await queue_partitions(gateway, namespace)
    kinds: tuple[TaskKey, ...] = ("record", "steps", "join")
    for pattern, _, node in [scan for kind in kinds for scan in _scans(gateway, namespace, None, partitions, kind)]:
        async for keys in _scan(gateway, pattern, node):
            for fields in (await _fields(gateway, [key.decode() for key in keys], LINKS)).values():
                for field in fields:
                    if (name := linked_object(field.decode())) is not None:
                        yield name


async def resumable_tasks(
    gateway: Gateway, namespace: Namespace, saved: str
) -> AsyncIterator[tuple[Record, bytes | None]]:
    """Yield the record of each task that has recorded anything and has not succeeded, with one of its saved values.

    A dead one may be replayed, so it counts, too; a cancelled one does not. Uses SCAN: a task that exists during the
    whole call is found, and may be found twice. Of tasks that have ended, only the state is read.

    Args:
        saved: Key of the saved value.

    `Record.problem` is set in a record that cannot be read. Raises `DecryptionError`.
    """
    partitions = await queue_partitions(gateway, namespace)
    for pattern, only, node in _scans(gateway, namespace, None, partitions, "steps"):
        async for keys in _scan(gateway, pattern, node):
            for partition, ids in _by_partition({one.steps(""): one for one in only}, keys).items():
                async for one in _resumable(gateway, partition, ids, saved):
                    yield one


async def _resumable(
    gateway: Gateway, partition: Partition, ids: Sequence[str], saved: str
) -> AsyncIterator[tuple[Record, bytes | None]]:
    read: list[Command] = [("HMGET", partition.record(one), "state", "entries", "forked") for one in ids]
    states = dict(zip(ids, await gateway.pipeline_each(read), strict=True))
    live = [task_id for task_id, reply in states.items() if isinstance(reply, Refused) or _may_resume(*reply)]
    if not live:
        return
    values = await gateway.pipeline_each([("HGET", partition.steps(one), f"s:{saved}") for one in live])
    for record, value in zip(await read_tasks(gateway, partition, live), values, strict=True):
        if record is not None:
            cipher = gateway.encryptor.of(partition, record.id)
            yield record, cipher.decrypt(f"s:{saved}", value) if isinstance(value, bytes) else None


def _may_resume(state: bytes | None, entries: bytes | None, forked: bytes | None) -> bool:
    return bool(entries or forked) and state not in (None, b"succeeded", b"cancelled")


async def _fields(gateway: Gateway, keys: list[str], pattern: str) -> dict[str, dict[bytes, bytes]]:
    """Return the fields that match, by key. Each round trip reads a page of every hash that has more."""
    found: dict[str, dict[bytes, bytes]] = {key: {} for key in keys}
    cursors: dict[str, Any] = dict.fromkeys(keys, b"0")
    while cursors:
        asked = [("HSCAN", key, cursor, "MATCH", pattern, "COUNT", _PAGE) for key, cursor in cursors.items()]
        for key, (cursor, flat) in zip(list(cursors), await gateway.pipeline(asked), strict=True):
            found[key].update(pairs(flat))
            if cursor == b"0":
                del cursors[key]
            else:
                cursors[key] = cursor
    return found


def _decrypted(gateway: Gateway, partition: Partition, task_id: str, fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    cipher = gateway.encryptor.of(partition, task_id)
    return {
        (name := field.removeprefix(b"s:").decode()): cipher.decrypt(f"s:{name}", value)
        for field, value in fields.items()
    }


_LATE: Final = 1.5
"""Intervals without a registration after which the leases of a worker are looked at."""

_RENEWED: Final = 0.6
"""Share of the lease within which a worker has renewed it: it does so each third."""

_LISTED: Final = 60.0
"""Seconds for which a lost worker that held nothing is listed."""

_LEASE: Final = 15.0
"""Lease of a worker that does not publish it."""


async def observed_workers(gateway: Gateway, namespace: Namespace) -> list[WorkerInfo]:
    """Return the registered workers, the longest running first, without lost ones whose tasks others have claimed.

    A lost worker is listed while it holds messages, and for a minute if it had none when it registered last.
    """
    registered = await list_workers(gateway, namespace)
    late = {info.id: info for info in registered if info.seen > _LATE * info.interval}
    if not late:
        return registered
    held: dict[str, float] = {}
    try:
        partitions = await queue_partitions(gateway, namespace)
        read = await asyncio.gather(*(_held(gateway, partition, late) for partition in partitions))
    except Refused:  # this user may read the registry only
        return registered
    for found in read:
        for name, idle in found.items():
            held[name] = min(idle, held.get(name, idle))
    return [
        replace(info, blocked=held[info.id] < _RENEWED * (info.lease or _LEASE)) if info.id in held else info
        for info in registered
        if info.id in held or not info.presumed_dead or (info.in_flight == 0 and info.seen < _LISTED)
    ]


async def _held(gateway: Gateway, partition: Partition, late: dict[str, WorkerInfo]) -> dict[str, float]:
    """Return the seconds since each of these workers renewed its leases last, if it holds messages of the partition."""
    try:
        *_, holders = await gateway.command("XPENDING", partition.ready, GROUP)
    except Refused as error:
        if not is_missing_group(error):
            raise
        return {}  # no worker has come yet
    names: Sequence[str] = [name.decode() for name, _ in holders or () if name.decode() in late]
    pages = await gateway.pipeline([("XPENDING", partition.ready, GROUP, "-", "+", 1, name) for name in names])
    return {name: page[0][2] / 1000 for name, page in zip(names, pages, strict=True) if page}
