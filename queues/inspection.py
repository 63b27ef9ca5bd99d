"""Looking at queues and tasks without touching them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .errors import Refused
from .gateway import Command, Gateway
from .keys import GROUP, RELEASED, Namespace, Partition
from .presence import list_workers, total_rates
from .records import Record, State, pairs, read_records

__all__ = ["QueueStats", "list_queues", "list_tasks", "queue_partitions"]


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue in numbers.

    depth: messages that no worker holds. in_flight: messages that one does. due: tasks that wait for their time.
    dead: dead letters. oldest_age: seconds that the oldest message of `depth` has waited, None where there is none.
    consumers: workers by name, with the number of messages each holds. rate: deliveries that all workers settle per
    second at present; it is kept by queue, so one partition alone has None.
    """

    queue: str
    depth: int
    in_flight: int
    due: int
    dead: int
    oldest_age: float | None
    consumers: dict[str, int]
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
        return asdict(self) | {"drain_time": self.drain_time}


async def queue_partitions(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> list[Partition]:
    """The partitions of one queue, or of every queue of the namespace, by name."""
    known = pairs(await gateway.command("HGETALL", namespace.queues))
    names = sorted(name.decode() for name in known)
    if queue is not None:
        names = [name for name in names if name == queue]
    return [namespace.partition(name, index) for name in names for index in range(int(known[name.encode()]))]


async def list_queues(gateway: Gateway, namespace: Namespace) -> list[QueueStats]:
    """Every queue of the namespace, by name; a queue's partitions are added up.

    What it costs depends on the numbers of partitions and workers, not on how many messages wait or run.
    """
    totals: dict[str, QueueStats] = {}
    for partition in await queue_partitions(gateway, namespace):
        stats = await partition_stats(gateway, partition)
        before = totals.get(stats.queue)
        totals[stats.queue] = stats if before is None else _sum(before, stats)
    rates = total_rates(await list_workers(gateway, namespace))
    return [replace(stats, rate=rates.get(stats.queue, 0.0)) for stats in totals.values()]


async def partition_stats(gateway: Gateway, partition: Partition) -> QueueStats:
    counts: list[Command] = [
        ("XLEN", partition.ready),
        ("ZCARD", partition.due),
        ("XLEN", partition.dead),
        ("TIME",),
    ]
    readers: list[Command] = [("XINFO", "GROUPS", partition.ready), ("XINFO", "CONSUMERS", partition.ready, GROUP)]
    try:  # in one pipeline: what is read or settled in between would be counted twice or not at all
        length, due, dead, time, groups, consumers = await gateway.pipeline([*counts, *readers])
    except Refused:  # no stream or no group yet: nothing was ever read
        length, due, dead, time = await gateway.pipeline(counts)
        groups, consumers = [], []
    held = {consumer[b"name"].decode(): consumer[b"pending"] for consumer in map(_mapping, consumers)}
    released = held.pop(RELEASED, 0)
    in_flight = sum(held.values())
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    oldest = await _oldest_waiting(gateway, partition, groups, released)
    return QueueStats(
        queue=partition.queue,
        depth=max(0, length - in_flight),  # a message that somebody deleted by hand may still be held
        in_flight=in_flight,
        due=due,
        dead=dead,
        oldest_age=None if oldest is None else max(0.0, (now_ms - oldest) / 1000),
        consumers=held,
    )


async def _oldest_waiting(
    gateway: Gateway, partition: Partition, groups: Sequence[Sequence[Any]], released: int
) -> int | None:
    """When the oldest message that nobody holds was sent, in milliseconds: its id begins with it."""
    last_read = next((group[b"last-delivered-id"] for group in map(_mapping, groups)), b"0-0")
    found = await gateway.command("XRANGE", partition.ready, b"(" + last_read, "+", "COUNT", 1)
    ids = [entry for entry, _ in found]
    if released:
        given_back = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1, RELEASED)
        ids += [entry for entry, *_ in given_back]
    return min((int(entry.partition(b"-")[0]) for entry in ids), default=None)


def _mapping(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _sum(one: QueueStats, other: QueueStats) -> QueueStats:
    ages = [age for age in (one.oldest_age, other.oldest_age) if age is not None]
    consumers = dict(one.consumers)
    for name, held in other.consumers.items():
        consumers[name] = consumers.get(name, 0) + held
    return replace(
        one,
        depth=one.depth + other.depth,
        in_flight=one.in_flight + other.in_flight,
        due=one.due + other.due,
        dead=one.dead + other.dead,
        oldest_age=max(ages, default=None),
        consumers=consumers,
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
    for partition in await queue_partitions(gateway, namespace, queue):
        cursor = "0"
        while True:
            reply = await gateway.command("SCAN", cursor, "MATCH", partition.records, "COUNT", 500, "TYPE", "hash")
            cursor = reply[0].decode()
            ids = [partition.task_id(key.decode()) for key in reply[1]]
            ids = [task_id for task_id in ids if not task_id.endswith((":steps", ":log"))]
            for record in await read_records(gateway, partition, ids):
                if record is not None and (not states or record.state in states) and task in (None, record.task):
                    yield record
            if cursor == "0":
                break
