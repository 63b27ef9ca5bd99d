"""The timeline of a partition: its tasks by time of enqueueing. Lists of tasks, newest first, page by page.

The script that stores a record adds its id to the timeline, and the script that deletes a record removes it. A record
that expires leaves its id behind, which the janitor removes. A page skips it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from ..envelope import is_task_id
from ..errors import DecryptionError, LargeValueLost, Refused
from ..junk import set_aside, split
from ..keys import Namespace, Partition, belongs_to
from ..records import Record, State, read_tasks
from ..transport.gateway import Gateway
from ..transport.scripts import queue_script
from .running import PendingEntry, pending_entries, read_running
from .views import list_tasks, queue_partitions

if TYPE_CHECKING:
    from ..task_filter import TaskFilter

_TRIM = queue_script("trim_timeline")

_CHUNK: Final = 200
"""Ids that are read at once."""

_TENANT_CHUNK: Final = 2_000
"""Ids that are read at once where those of other tenants are passed over."""

_MAX_READ: Final = 5_000
"""Records that one page reads at most, so that a filter that matches little does bounded work."""

_TRIMMED: Final = 500
"""Ids that are checked in one script."""

_WORTH: Final = 4
"""Trimming continues while one of so many checked ids is removed."""


@dataclass(frozen=True, slots=True)
class TaskPage:
    """Tasks of one page.

    Attributes:
        cursor: Continues the list; None after the last page.
        read: Number of records it has read.
        unreadable: Tasks whose arguments the filter has conditions on and that cannot be read, with the problem.
    """

    tasks: list[Record]
    cursor: str | None
    read: int = 0
    unreadable: Sequence[tuple[Record, str]] = ()


_FARTHEST: Final = 2.0**53
"""Largest score that is an exact number."""


class _Position(NamedTuple):
    """Place of a task in the list: the greatest one is the first."""

    at: int
    id: str
    queue: str
    partition: int


async def page_tasks(
    gateway: Gateway,
    namespace: Namespace,
    wanted: TaskFilter,
    *,
    queue: str | None = None,
    limit: int,
    cursor: str | None = None,
) -> TaskPage:
    """Return tasks of one queue, or of all queues, the newest first.

    A page may have fewer tasks than `limit` before the list ends, because the records that it reads are bounded. Tasks
    that are enqueued meanwhile do not move the pages that follow. If only running tasks are wanted, they are read from
    the pending lists, so the other tasks cost nothing, and the time by which they are sorted is that since which their
    messages are in the queue.

    Args:
        cursor: That of the previous page.

    Raises:
        ValueError: The cursor is not one of a page.
    """
    partitions = await queue_partitions(gateway, namespace, queue)
    if wanted.states and set(wanted.states) == {State.RUNNING}:
        return await _page_running(
            gateway, namespace, partitions, wanted, limit, None if cursor is None else _held(cursor)
        )
    after = None if cursor is None else _decode(cursor)
    readers = await asyncio.gather(*(_reader(gateway, namespace, one, wanted, after) for one in partitions))
    heads = [(_descending(reader.first), at) for at, reader in enumerate(readers) if reader.positions]
    heapq.heapify(heads)
    found: list[Record] = []
    unreadable: list[tuple[Record, str]] = []
    last, read = after, 0
    while heads and len(found) < limit and read < _MAX_READ:
        chunk: list[_Position] = []
        while heads and len(chunk) < min(_CHUNK, limit - len(found)):
            _, at = heads[0]
            chunk.append(readers[at].positions.popleft())
            await readers[at].load()
            if readers[at].positions:
                heapq.heapreplace(heads, (_descending(readers[at].first), at))
            else:
                heapq.heappop(heads)
        matching = [record for record in await _records(gateway, namespace, chunk) if wanted.matches(record)]
        found += await _with_arguments(gateway, namespace, wanted, matching, unreadable)
        last, read = chunk[-1], read + len(chunk)
    return TaskPage(found, _encode(last) if heads and last is not None else None, read, unreadable)


async def count_tasks(gateway: Gateway, namespace: Namespace, queue: str | None = None) -> int:
    """Return the number of tasks in the timelines of one queue or all; a few of them may have expired."""
    partitions = await queue_partitions(gateway, namespace, queue)
    counts = await gateway.pipeline_each([("ZCARD", partition.timeline) for partition in partitions])
    return sum(count for count in counts if isinstance(count, int))


async def has_expired(gateway: Gateway, namespace: Namespace, task_id: str, queue: str | None = None) -> bool:
    """Return whether a task without a record was there: the timeline has its id until the janitor removes it."""
    partitions = await queue_partitions(gateway, namespace, queue)
    if not belongs_to(namespace.tenant, task_id):
        return False
    scores = await gateway.pipeline_each([("ZSCORE", partition.timeline, task_id) for partition in partitions])
    return any(isinstance(score, bytes) for score in scores)


async def _with_arguments(
    gateway: Gateway,
    namespace: Namespace,
    wanted: TaskFilter,
    records: Sequence[Record],
    unreadable: list[tuple[Record, str]],
) -> list[Record]:
    """Return the records whose arguments match; those that cannot be read are added to `unreadable`."""
    if not wanted.where:
        return list(records)
    from ..task_filter import arguments_match  # a plain task needs none of it

    async def matches(record: Record) -> bool | str:
        partition = namespace.partition(record.queue, record.partition)
        try:
            return await arguments_match(
                gateway, partition, record.id, record.task, record.args, record.secrets, wanted.where
            )
        except (DecryptionError, LargeValueLost) as error:
            return str(error)

    answers = await asyncio.gather(*(matches(record) for record in records))
    unreadable += [(record, answer) for record, answer in zip(records, answers, strict=True) if isinstance(answer, str)]
    return [record for record, answer in zip(records, answers, strict=True) if answer is True]


async def _page_running(
    gateway: Gateway,
    namespace: Namespace,
    partitions: Sequence[Partition],
    wanted: TaskFilter,
    limit: int,
    before: PendingEntry | None,
) -> TaskPage:
    entries = await pending_entries(gateway, partitions, before)
    found: list[Record] = []
    unreadable: list[tuple[Record, str]] = []
    read = 0
    while read < min(len(entries), _MAX_READ) and len(found) < limit:
        chunk = entries[read : read + min(_CHUNK, limit - len(found))]
        matching = [
            record
            for record in await read_running(gateway, partitions, chunk)
            if wanted.matches(record) and wanted.is_of_time(record) and belongs_to(namespace.tenant, record.id)
        ]
        found += await _with_arguments(gateway, namespace, wanted, matching, unreadable)
        read += len(chunk)
    return TaskPage(found, _encode(entries[read - 1]) if read < len(entries) else None, read, unreadable)


def _descending(position: _Position) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Return a sort key that puts the greatest position first."""
    return -position.at, _reversed(position.id), _reversed(position.queue), -position.partition


def _reversed(text: str) -> tuple[int, ...]:
    """Return a sort key of the opposite order; the last number puts a longer text first."""
    return *(-ord(char) for char in text), 1


async def _records(gateway: Gateway, namespace: Namespace, positions: Sequence[_Position]) -> list[Record]:
    """Return the records that still exist, in the order of the positions."""
    groups: dict[Partition, list[_Position]] = {}
    for position in positions:
        groups.setdefault(namespace.partition(position.queue, position.partition), []).append(position)
    read = await asyncio.gather(
        *(read_tasks(gateway, where, [one.id for one in some]) for where, some in groups.items())
    )
    by_position = {
        position: record
        for some, records in zip(groups.values(), read, strict=True)
        for position, record in zip(some, records, strict=True)
        if record is not None
    }
    return [by_position[position] for position in positions if position in by_position]


@dataclass(slots=True)
class _Reader:
    """The timeline of one partition, page by page, the newest task first."""

    gateway: Gateway
    partition: Partition
    since: int | None
    until: int | None
    last: _Position | None
    tenant: str | None = None
    positions: deque[_Position] = field(default_factory=deque)
    more: bool = True

    @property
    def first(self) -> _Position:
        return self.positions[0]

    async def load(self) -> None:
        """Read the next page if this one is used up. More tasks of one millisecond than a page make it longer.

        Ids of other tenants are passed over: their records are not read.
        """
        size = _CHUNK if self.tenant is None else _TENANT_CHUNK
        while self.more and not self.positions:
            limits: list[int] = [
                one for one in (self.until, None if self.last is None else self.last.at) if one is not None
            ]
            top = min(limits, default="+inf")
            bottom = "-inf" if self.since is None else self.since
            key = self.partition.timeline
            flat = await self.gateway.command("ZREVRANGEBYSCORE", key, top, bottom, "WITHSCORES", "LIMIT", 0, size)
            read = [
                _Position(_time(score), task_id.decode("utf-8", "replace"), self.partition.queue, self.partition.index)
                for task_id, score in zip(flat[::2], flat[1::2], strict=True)
            ]
            new = [one for one in read if self.last is None or one < self.last]
            self.positions.extend(one for one in new if belongs_to(self.tenant, one.id))
            self.more = len(read) == size
            if new:
                self.last = new[-1]
            else:
                size *= 2


def _time(score: bytes) -> int:
    """Return a score as milliseconds; another program may have stored any number."""
    return int(min(max(float(score), -_FARTHEST), _FARTHEST))


async def _reader(
    gateway: Gateway, namespace: Namespace, partition: Partition, wanted: TaskFilter, after: _Position | None
) -> _Reader:
    reader = _Reader(gateway, partition, wanted.since, wanted.until, after, namespace.tenant)
    counts = await gateway.pipeline_each(
        [("ZCARD", partition.timeline), ("XLEN", partition.ready), ("ZCARD", partition.due)]
    )
    known, ready, due = (0 if isinstance(count, Refused) else count for count in counts)  # a key of another type
    if known >= ready + due:
        await reader.load()
    else:
        await _scan(reader, namespace)
    return reader


async def _scan(reader: _Reader, namespace: Namespace) -> None:
    """Fill a reader from the records of a partition whose timeline lacks tasks: another program has changed it."""
    reader.more = False
    found: list[_Position] = []
    async for record in list_tasks(reader.gateway, namespace, partition=reader.partition):
        at = record.enqueued_at or 0
        if (reader.since is None or at >= reader.since) and (reader.until is None or at <= reader.until):
            found.append(_Position(at, record.id, record.queue, record.partition))
        if len(found) == _MAX_READ:
            break
    reader.positions.extend(sorted((one for one in found if reader.last is None or one < reader.last), reverse=True))


def _encode(position: _Position | PendingEntry) -> str:
    """Return the cursor of a list. That of running tasks has a number in the place of an id."""
    parts = position if isinstance(position, _Position) else astuple(position)
    return base64.urlsafe_b64encode(orjson.dumps(list(parts))).decode().rstrip("=")


def _decode(cursor: str) -> _Position:
    at, place, queue, index = _parts(cursor)
    if not isinstance(place, str):
        raise _wrong(cursor)
    return _Position(at, place, queue, index)


def _held(cursor: str) -> PendingEntry:
    at, place, queue, index = _parts(cursor)
    if not isinstance(place, int) or not (0 <= at < _FARTHEST and 0 <= place < _FARTHEST):
        raise _wrong(cursor)
    return PendingEntry(at, place, queue, index)


def _parts(cursor: str) -> tuple[int, object, str, int]:
    try:
        at, place, queue, index = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return int(at), place, str(queue), int(index)
    except (binascii.Error, TypeError, ValueError):
        raise _wrong(cursor) from None


def _wrong(cursor: str) -> ValueError:
    return ValueError(f"cursor must be one that an earlier page of the same list ended with, got {cursor!r}")


async def trim_timeline(gateway: Gateway, partition: Partition) -> int:
    """Remove ids whose record has expired; return their number.

    The oldest ids are checked first, then ids at random, because old tasks may be alive. Each time, this ends when few
    of the checked ids are removed, as in the expiry cycle of Redis: the cost depends on what is removed, and at most
    about a quarter of a large timeline is left behind.
    """
    removed = 0
    oldest = ("ZRANGE", partition.timeline, 0, _TRIMMED - 1)
    for choose in (oldest, ("ZRANDMEMBER", partition.timeline, _TRIMMED)):
        while found := await gateway.command(*choose):
            ids, foreign = split(found, is_task_id)
            gone = await set_aside(gateway, partition, partition.timeline, "zset", foreign)
            if ids:
                gone += await gateway.run(_TRIM, [partition.timeline, *map(partition.record, ids)], ids)
            removed += gone
            if gone * _WORTH < len(found):
                break
    return removed
