"""Storing tasks: each in the partition of its key, many in few round trips, and again elsewhere where that closed.

What is promised: tasks of one key that come in one call are on one stream in the order in which they came. So no two
scripts for one partition are under way at the same time: a batch has one per partition, and the next batch goes out
when this one is stored. Meanwhile that one is being made.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Final, NamedTuple

from .gateway import Argument, Gateway
from .keys import Partition
from .scripts import queue_script
from .way import Way

__all__ = ["Entry", "Sending"]

_ENQUEUE = queue_script("enqueue")
_SCHEDULE = queue_script("schedule")

_SCRIPT_TASKS: Final = 500
_SCRIPT_BYTES: Final = 4 * 1024 * 1024
"""What one script carries at most, so that no other client waits long for it."""

_SCRIPTS: Final = 4
"""As many full scripts make a batch, where the queue has so many partitions."""

_SLICE: Final = 50
"""Tasks without a key that stay together, so that a script still carries many."""


class Entry(NamedTuple):
    """A task as it is stored. number: what its key stands for; None where it has no key. own_id: its id is the
    caller's, so it may be known from before.
    """

    id: str
    envelope: bytes
    arguments: bytes
    number: int | None
    own_id: bool


class Sending:
    """Stores entries on one queue. delay: seconds until they may run."""

    def __init__(self, gateway: Gateway, way: Way, delay: float) -> None:
        self._gateway = gateway
        self._way = way
        self._delay_ms = round(delay * 1000)

    async def one(self, entry: Entry) -> Partition:
        """Store one task; returns where it is."""
        await self._way.look()
        number = self._way.turn() if entry.number is None else entry.number
        while True:
            partition = self._way.partition(number)
            if entry.own_id and (known := await self._known(entry.id, self._way.former(number))) is not None:
                return known
            if (await self._store(partition, [entry]))[0] >= 0:
                return partition
            await self._way.refused([partition])

    async def all(self, entries: Iterable[Entry] | AsyncIterable[Entry]) -> AsyncGenerator[list[tuple[str, Partition]]]:
        """Store tasks batch by batch; yields the ids of each that is stored, with where they are, in their order."""
        await self._way.look()
        under_way: asyncio.Task[list[tuple[str, Partition]]] | None = None
        try:
            async for batch in self._batches(entries):
                if under_way is not None:
                    yield await under_way
                under_way = asyncio.create_task(self._batch(batch))
                await asyncio.sleep(0)  # it goes out now, before the next one is made
            if under_way is not None:
                yield await under_way
        finally:
            if under_way is not None:
                under_way.cancel()
                await asyncio.gather(under_way, return_exceptions=True)

    async def _batches(self, entries: Iterable[Entry] | AsyncIterable[Entry]) -> AsyncIterator[list[Entry]]:
        batch: list[Entry] = []
        size = 0
        async for entry in _each(entries):
            weight = len(entry.envelope) + len(entry.arguments)
            if batch and (size + weight > _SCRIPT_BYTES or len(batch) >= self._most):
                yield batch
                batch, size = [], 0
            batch.append(entry)
            size += weight
        if batch:
            yield batch

    @property
    def _most(self) -> int:
        return _SCRIPT_TASKS * min(self._way.width, _SCRIPTS)

    async def _batch(self, batch: Sequence[Entry]) -> list[tuple[str, Partition]]:
        numbers = self._numbers(batch)
        found: dict[int, Partition] = {}
        left: Sequence[int] = range(len(batch))
        while left:
            groups: dict[Partition, list[int]] = defaultdict(list)
            for position in left:
                entry, number = batch[position], numbers[position]
                if entry.own_id and (known := await self._known(entry.id, self._way.former(number))) is not None:
                    found[position] = known
                else:
                    groups[self._way.partition(number)].append(position)
            stored = await asyncio.gather(
                *(self._group(where, [batch[position] for position in group]) for where, group in groups.items())
            )
            refused: dict[int, Partition] = {}
            for (where, group), answers in zip(groups.items(), stored, strict=True):
                for position, answer in zip(group, answers, strict=True):
                    (refused if answer < 0 else found)[position] = where
            await self._way.refused(list(dict.fromkeys(refused.values())))
            left = sorted(refused)
        return [(entry.id, found[position]) for position, entry in enumerate(batch)]

    def _numbers(self, batch: Sequence[Entry]) -> list[int]:
        """Each entry's number; those without a key take turns, slice by slice."""
        keyless = sum(entry.number is None for entry in batch)
        slices = min(self._way.width, max(1, keyless // _SLICE))
        length = max(1, -(-keyless // slices))
        turn, used = self._way.turn(), 0
        numbers: list[int] = []
        for entry in batch:
            if entry.number is not None:
                numbers.append(entry.number)
                continue
            if used == length:
                turn, used = self._way.turn(), 0
            used += 1
            numbers.append(turn)
        return numbers

    async def _group(self, partition: Partition, entries: Sequence[Entry]) -> list[int]:
        """Store entries of one partition, script after script."""
        answers: list[int] = []
        for start in range(0, len(entries), _SCRIPT_TASKS):
            answers += await self._store(partition, entries[start : start + _SCRIPT_TASKS])
        return answers

    async def _store(self, partition: Partition, entries: Sequence[Entry]) -> list[int]:
        records = [partition.record(entry.id) for entry in entries]
        args: list[Argument] = []
        if self._delay_ms > 0:
            args.append(self._delay_ms)
            for entry in entries:
                args += (entry.id, entry.envelope, entry.arguments)
            keys = [partition.due, partition.nudge, partition.closed, *records]
            answers: list[int] = await self._gateway.run(_SCHEDULE, keys, args)
        else:
            for entry in entries:
                args += (entry.envelope, entry.arguments)
            answers = await self._gateway.run(_ENQUEUE, [partition.ready, partition.closed, *records], args)
        return answers

    async def _known(self, task_id: str, former: Sequence[Partition]) -> Partition | None:
        """Where the task is already. Nothing comes into these partitions any more, so looking is enough."""
        found = await self._gateway.pipeline([("EXISTS", partition.record(task_id)) for partition in former])
        return next((partition for partition, exists in zip(former, found, strict=True) if exists), None)


async def _each(entries: Iterable[Entry] | AsyncIterable[Entry]) -> AsyncIterator[Entry]:
    if isinstance(entries, AsyncIterable):
        async for entry in entries:
            yield entry
    else:
        for entry in entries:
            yield entry
