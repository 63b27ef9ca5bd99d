"""The running tasks of partitions, from their pending lists: a backlog of other tasks costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..envelope import Envelope
from ..errors import Refused, UnreadableEnvelope
from ..keys import GROUP, Partition, is_reserved
from ..records import Record, State, read_tasks
from ..transport.clients import is_missing_group
from ..transport.gateway import Gateway
from ..transport.scripts import pairs

_PAGE: Final = 1_000
"""Entries of a pending list that are read at once."""


@dataclass(frozen=True, slots=True, order=True)
class PendingEntry:
    """A message that a worker holds. The greatest is the one that was queued last."""

    at: int
    number: int
    queue: str
    index: int

    @property
    def id(self) -> str:
        return f"{self.at}-{self.number}"


async def running_tasks(gateway: Gateway, partitions: Sequence[Partition], limit: int) -> list[Record]:
    """Return running tasks, those with the oldest messages first: at most `limit`."""
    entries = await pending_entries(gateway, partitions)
    records = await read_running(gateway, partitions, entries[: -limit - 1 : -1])
    return sorted(records, key=lambda record: record.started_at or record.enqueued_at or 0)


async def pending_entries(
    gateway: Gateway, partitions: Sequence[Partition], before: PendingEntry | None = None
) -> list[PendingEntry]:
    """Return the messages that workers hold, the one that was queued last first. before: without it and later ones."""
    found = await asyncio.gather(*(_pending(gateway, partition, before) for partition in partitions))
    return sorted((entry for some in found for entry in some), reverse=True)


async def _pending(gateway: Gateway, partition: Partition, before: PendingEntry | None) -> list[PendingEntry]:
    found: list[PendingEntry] = []
    start, end = "-", "+" if before is None else str(before.at)
    while True:
        try:
            page = await gateway.command("XPENDING", partition.ready, GROUP, start, end, _PAGE)
        except Refused as error:
            if not is_missing_group(error):
                raise
            return []  # no worker has come yet
        for entry, holder, *_ in page:
            at, _, number = entry.decode().partition("-")
            known = PendingEntry(int(at), int(number), partition.queue, partition.index)
            if not is_reserved(holder.decode("utf-8", "replace")) and (before is None or known < before):
                found.append(known)
        if len(page) < _PAGE:
            return found
        at, _, number = page[-1][0].decode().partition("-")
        start = f"{at}-{int(number) + 1}"


async def read_running(
    gateway: Gateway, partitions: Iterable[Partition], entries: Sequence[PendingEntry]
) -> list[Record]:
    """Return the tasks of these messages that are running, in the order of the messages."""
    where = {(partition.queue, partition.index): partition for partition in partitions}
    groups: dict[tuple[str, int], list[PendingEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.queue, entry.index), []).append(entry)
    read = await asyncio.gather(
        *(_records(gateway, where[place], [entry.id.encode() for entry in some]) for place, some in groups.items())
    )
    found = {
        entry: record
        for some, records in zip(groups.values(), read, strict=True)
        for entry, record in zip(some, records, strict=True)
    }
    return [
        record
        for entry in entries
        if (record := found[entry]) is not None and record.queued_at == entry.at  # else another message names its id
    ]


async def _records(gateway: Gateway, partition: Partition, entries: Sequence[bytes]) -> list[Record | None]:
    """Return the running task of each message; None where it runs no more, or the message names none."""
    messages = await gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry in entries])
    ids = [_task_id(pairs(message[0][1])) if message else None for message in messages]
    named = [task_id for task_id in ids if task_id is not None]
    records = iter(await read_tasks(gateway, partition, named))
    found = [None if task_id is None else next(records) for task_id in ids]
    return [record if record is not None and record.state is State.RUNNING else None for record in found]


def _task_id(fields: dict[bytes, bytes]) -> str | None:
    try:
        return Envelope.decode(fields.get(b"env", b"")).id
    except UnreadableEnvelope:
        return None
