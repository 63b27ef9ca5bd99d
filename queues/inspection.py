"""Looking at queues and tasks without touching them.

What tasks have saved in their checkpoints under names that begin alike; of one task, or of all that are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from .envelope import check_task_id
from .errors import Refused
from .keys import GROUP, RELEASED, SUSPECTS, Namespace, Partition
from .partitions import load_routes
from .presence import list_workers, total_rates
from .records import Record, State, read_records
from .transport import Command, Gateway, pairs

__all__ = [
    "QueueStats",
    "checkpoint_fields",
    "checkpoint_fields_of_all",
    "find_task",
    "list_queues",
    "list_tasks",
    "queue_partitions",
    "walks",
]

_AT_ONCE = 64
"""Partitions that are looked at together."""


_OF_A_PARTITION = ("depth", "in_flight", "due", "dead", "oldest_age")


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue in numbers.

    depth: messages that no worker holds. in_flight: messages that one does. due: tasks that wait for their time.
    dead: dead letters. oldest_age: seconds that the oldest message of `depth` has waited, None where there is none.
    consumers: workers by name, with the number of messages each holds. index: the partition, None for all of the
    queue's together, which then stand in `partitions`. rate: deliveries that all workers settle per second at present;
    it is kept by queue, so one partition alone has None.
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

    @property
    def drain_time(self) -> float | None:
        """Seconds until nothing waits or runs, at the present rate and if nothing is added.

        0 where nothing waits or runs already; None where something does and nothing is being settled, so nobody knows.
        """
        left = self.depth + self.in_flight
        if not left:
            return 0.0
        return left / self.rate if self.rate else None

    def summary(self) -> dict[str, Any]:
        """The numbers as plain data, for programs."""
        shown = asdict(self) | {"drain_time": self.drain_time}
        del shown["index"]
        shown["partitions"] = [
            {"index": one.index, **{name: value for name, value in asdict(one).items() if name in _OF_A_PARTITION}}
            for one in self.partitions
        ]
        return shown


async def queue_partitions(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> list[Partition]:
    """The partitions of one queue, or of every queue of the namespace, by name: all that may hold anything."""
    routes = await load_routes(gateway, namespace)
    return [
        namespace.partition(name, index)
        for name, route in routes.items()
        if queue in (None, name)
        for index in route.indexes
    ]


async def find_task(gateway: Gateway, namespace: Namespace, task_id: str) -> Partition | None:
    """The partition that has the task, sought in every queue of the namespace. `ValueError` for what is no id."""
    check_task_id(task_id)
    candidates = await queue_partitions(gateway, namespace)
    found = await gateway.pipeline([("EXISTS", candidate.record(task_id)) for candidate in candidates])
    return next((candidate for candidate, exists in zip(candidates, found, strict=True) if exists), None)


async def list_queues(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> list[QueueStats]:
    """One queue, or every queue of the namespace, by name; partitions are added up, and kept apart in `partitions`.

    What it costs depends on the numbers of partitions and workers, not on how many messages wait or run.
    """
    found = await _all_stats(gateway, await queue_partitions(gateway, namespace, queue))
    queues: dict[str, list[QueueStats]] = {}
    for stats in found:
        queues.setdefault(stats.queue, []).append(stats)
    rates = total_rates(await list_workers(gateway, namespace))
    return [replace(_sum(partitions), rate=rates.get(name, 0.0)) for name, partitions in queues.items()]


async def _all_stats(gateway: Gateway, partitions: Sequence[Partition]) -> list[QueueStats]:
    found: list[QueueStats] = []
    for start in range(0, len(partitions), _AT_ONCE):
        some = partitions[start : start + _AT_ONCE]
        found += await asyncio.gather(*(partition_stats(gateway, partition) for partition in some))
    return found


async def partition_stats(gateway: Gateway, partition: Partition) -> QueueStats:
    counts: list[Command] = [
        ("XLEN", partition.ready),
        ("ZCARD", partition.due),
        ("XLEN", partition.dead),
        ("TIME",),
    ]
    readers: list[Command] = [("XINFO", "GROUPS", partition.ready), ("XINFO", "CONSUMERS", partition.ready, GROUP)]
    node = partition.ready
    try:  # in one pipeline: what is read or settled in between would be counted twice or not at all
        length, due, dead, time, groups, consumers = await gateway.pipeline([*counts, *readers], node_of=node)
    except Refused:  # no stream or no group yet: nothing was ever read
        length, due, dead, time = await gateway.pipeline(counts, node_of=node)
        groups, consumers = [], []
    held = {consumer[b"name"].decode(): consumer[b"pending"] for consumer in map(_mapping, consumers)}
    waiting = [name for name in (RELEASED, SUSPECTS) if held.pop(name, 0)]
    in_flight = sum(held.values())
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    oldest = await _oldest_waiting(gateway, partition, groups, waiting)
    return QueueStats(
        queue=partition.queue,
        depth=max(0, length - in_flight),  # a message that somebody deleted by hand may still be held
        in_flight=in_flight,
        due=due,
        dead=dead,
        oldest_age=None if oldest is None else max(0.0, (now_ms - oldest) / 1000),
        consumers=held,
        index=partition.index,
    )


async def _oldest_waiting(
    gateway: Gateway, partition: Partition, groups: Sequence[Sequence[Any]], waiting: Sequence[str]
) -> int | None:
    """When the oldest message that nobody holds was sent, in milliseconds: its id begins with it."""
    last_read = next((group[b"last-delivered-id"] for group in map(_mapping, groups)), b"0-0")
    found = await gateway.command("XRANGE", partition.ready, b"(" + last_read, "+", "COUNT", 1)
    ids = [entry for entry, _ in found]
    for name in waiting:
        first = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1, name)
        ids += [entry for entry, *_ in first]
    return min((int(entry.partition(b"-")[0]) for entry in ids), default=None)


def _mapping(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _sum(partitions: Sequence[QueueStats]) -> QueueStats:
    """The numbers of a queue, from those of its partitions."""
    consumers: dict[str, int] = {}
    for one in partitions:
        for name, held in one.consumers.items():
            consumers[name] = consumers.get(name, 0) + held
    return replace(
        partitions[0],
        depth=sum(one.depth for one in partitions),
        in_flight=sum(one.in_flight for one in partitions),
        due=sum(one.due for one in partitions),
        dead=sum(one.dead for one in partitions),
        oldest_age=max((one.oldest_age for one in partitions if one.oldest_age is not None), default=None),
        consumers=consumers,
        index=None,
        partitions=tuple(partitions),
    )


async def list_tasks(
    gateway: Gateway,
    namespace: Namespace,
    *,
    queue: str | None = None,
    states: Sequence[State] = (),
    task: str | None = None,
) -> AsyncIterator[Record]:
    """Tasks that have a record, in no particular order, found by SCAN: bounded work per step, no key is locked."""
    partitions = await queue_partitions(gateway, namespace, queue)
    for pattern, only, node in walks(gateway, namespace, queue, partitions):
        cursor = "0"
        while True:
            scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", 500, "TYPE", "hash")
            reply = await gateway.command(*scan, node_of=node)
            cursor = reply[0].decode()
            for partition, ids in _by_partition(only, reply[1]).items():
                for record in await read_records(gateway, partition, ids):
                    if record is not None and (not states or record.state in states) and task in (None, record.task):
                        yield record
            if cursor == "0":
                break


def walks(
    gateway: Gateway, namespace: Namespace, queue: str | None, partitions: Sequence[Partition]
) -> list[tuple[str, Sequence[Partition], str | None]]:
    """What to go through: pattern, the partitions meant, and a key of the node. One server is walked once; in a
    cluster each partition is sought on its own node.
    """
    if not gateway.clustered:
        return [(namespace.records(queue), partitions, None)] if partitions else []
    return [(partition.records, [partition], partition.ready) for partition in partitions]


def _by_partition(partitions: Sequence[Partition], keys: Sequence[bytes]) -> dict[Partition, list[str]]:
    """The ids in keys of records, by the partition they are in; steps and what is in no such partition left out."""
    known = {partition.records.removesuffix("*"): partition for partition in partitions}
    found: dict[Partition, list[str]] = {}
    for key in keys:
        head, marker, task_id = key.decode().partition(":task:")
        partition = known.get(head + marker)
        if partition is not None and not task_id.endswith((":steps", ":log")):
            found.setdefault(partition, []).append(task_id)
    return found


_PAGE: Final = 500
"""Keys, and fields of a hash, that are asked for at once."""

_STEPS: Final = ":steps"


async def checkpoint_fields(gateway: Gateway, partition: Partition, task_id: str, beginning: str) -> dict[str, bytes]:
    """By name, what a task has saved. beginning: of the names. Raises `DecryptionError`."""
    found = await _fields(gateway, [partition.steps(task_id)], beginning)
    return _opened(gateway, partition, task_id, found[partition.steps(task_id)])


async def checkpoint_fields_of_all(
    gateway: Gateway, namespace: Namespace, beginning: str
) -> AsyncIterator[tuple[Partition, str, dict[str, bytes]]]:
    """Of every task that has a checkpoint: its partition, its id, and by name what it has saved, often nothing.

    Found by SCAN: a task that is there from the beginning to the end is found, one may be found twice, and no key is
    locked. What is there in other fields is not read. Raises `DecryptionError`.
    """
    partitions = await queue_partitions(gateway, namespace)
    for pattern, only, node in walks(gateway, namespace, None, partitions):
        known = {partition.records.removesuffix("*"): partition for partition in only}
        cursor = b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", pattern + _STEPS, "COUNT", _PAGE, "TYPE", "hash")
            cursor, keys = await gateway.command(*scan, node_of=node)
            for key, saved in (await _fields(gateway, [key.decode() for key in keys], beginning)).items():
                head, marker, rest = key.partition(":task:")
                if (partition := known.get(head + marker)) is not None:
                    task_id = rest.removesuffix(_STEPS)
                    yield partition, task_id, _opened(gateway, partition, task_id, saved)
            if cursor == b"0":
                break


async def _fields(gateway: Gateway, keys: list[str], beginning: str) -> dict[str, dict[bytes, bytes]]:
    """By key, the fields whose names begin so. Each round asks all of the hashes that are not read to their end."""
    found: dict[str, dict[bytes, bytes]] = {key: {} for key in keys}
    cursors: dict[str, Any] = dict.fromkeys(keys, b"0")
    pattern = f"s:{beginning}*"
    while cursors:
        asked = [("HSCAN", key, cursor, "MATCH", pattern, "COUNT", _PAGE) for key, cursor in cursors.items()]
        for key, (cursor, flat) in zip(list(cursors), await gateway.pipeline(asked), strict=True):
            found[key].update(pairs(flat))
            if cursor == b"0":
                del cursors[key]
            else:
                cursors[key] = cursor
    return found


def _opened(gateway: Gateway, partition: Partition, task_id: str, fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    seal = gateway.encryptor.of(partition, task_id)
    return {
        (name := field.removeprefix(b"s:").decode()): seal.decrypt(f"s:{name}", value)
        for field, value in fields.items()
    }
