"""Storing tasks: each in the partition of its key, many in few round trips, and again elsewhere where that closed.

What is promised: tasks of one key that come in one call are on one stream in the order in which they came. So no two
scripts for one partition are under way at the same time: a batch has one per partition, and the next batch goes out
when this one is stored. Meanwhile that one is being made.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Final

from .envelope import TaskMessage
from .errors import NotReplicated, StillRunning
from .keys import Partition
from .partitions import PartitionRouter
from .transport import Argument, Gateway, Script, queue_script

__all__ = ["BatchEnqueuer"]

_ANEW = queue_script("reset_task")
_ENQUEUE = queue_script("enqueue")
_SCHEDULE = queue_script("schedule")

_SCRIPT_TASKS: Final = 500
_SCRIPT_BYTES: Final = 4 * 1024 * 1024
"""What one script carries at most, so that no other client waits long for it."""

_SCRIPTS: Final = 4
"""As many full scripts make a batch, where the queue has so many partitions."""

_SLICE: Final = 50
"""Tasks without a key that stay together, so that a script still carries many."""


class BatchEnqueuer:
    """Stores messages on one queue.

    delay: seconds until they may run. replicated: whether replicas must have them too. Raises `NotReplicated` with the
    ids of those that too few are known to have.
    """

    def __init__(self, gateway: Gateway, way: PartitionRouter, delay: float, *, replicated: bool = False) -> None:
        self._gateway = gateway
        self._way = way
        self._delay_ms = round(delay * 1000)
        self._replicated = replicated

    async def one(self, message: TaskMessage) -> Partition:
        """Store one task; returns where it is."""
        await self._way.refresh()
        number = self._way.next_number() if message.number is None else message.number
        while True:
            partition = self._way.partition(number)
            if message.own_id and (known := await self._known({0: (message.id, number)})):
                await self._confirm({known[0]: [message]})
                return known[0]
            if (await self._store(partition, [message]))[0] >= 0:
                return partition
            await self._way.on_closed([partition])

    async def fresh(self, message: TaskMessage) -> Partition:
        """Store one task of the caller's own id, in the place of a former one that has ended; returns where it is.

        Raises `StillRunning`.
        """
        await self._way.refresh()
        number = self._way.next_number() if message.number is None else message.number
        token = secrets.token_hex(8)
        for former in self._way.closed_partitions(number):
            await self._begin(former, message, token)
        while not await self._begin(partition := self._way.partition(number), message, token):
            await self._way.on_closed([partition])
        return partition

    async def _begin(self, partition: Partition, message: TaskMessage, token: str) -> bool:
        """Begin a task afresh; False where the partition is closed, and all that had ended there is gone."""
        keys = [
            partition.ready,
            partition.closed,
            partition.record(message.id),
            partition.steps(message.id),
            partition.log(message.id),
            partition.dead,
        ]
        answer: bytes = await self._gateway.run(_ANEW, keys, [message.envelope, message.arguments, token])
        if answer not in (b"stored", b"closed"):
            raise StillRunning(message.id, answer.decode())
        return answer == b"stored"

    async def all(
        self, messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage]
    ) -> AsyncGenerator[list[tuple[str, Partition]]]:
        """Store tasks batch by batch; yields the ids of each that is stored, with where they are, in their order."""
        await self._way.refresh()
        under_way: asyncio.Task[list[tuple[str, Partition]]] | None = None
        try:
            async for batch in self._batches(messages):
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

    async def _batches(
        self, messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage]
    ) -> AsyncIterator[list[TaskMessage]]:
        batch = _Batch()
        if isinstance(messages, AsyncIterable):
            async for message in messages:
                if full := batch.add(message, self._most):
                    yield full
        else:
            most = self._most
            for message in messages:
                if full := batch.add(message, most):
                    yield full
                    most = self._most
        if batch.messages:
            yield batch.messages

    @property
    def _most(self) -> int:
        return _SCRIPT_TASKS * min(self._way.width, _SCRIPTS)

    async def _batch(self, batch: Sequence[TaskMessage]) -> list[tuple[str, Partition]]:
        """Store messages, each partition's in their order; returns their ids and where they are."""
        await self._way.refresh()
        if (only := self._way.only) is not None and min(await self._store(only, batch)) >= 0:
            return [(message.id, only) for message in batch]
        numbers = self._numbers(batch)
        found: dict[int, Partition] = {}
        left: Sequence[int] = range(len(batch))
        while left:
            known = await self._known({one: (batch[one].id, numbers[one]) for one in left if batch[one].own_id})
            if known:
                await self._confirm(_by_partition(known, batch))
                found |= known
            groups: dict[Partition, list[int]] = defaultdict(list)
            for position in left:
                if position not in found:
                    groups[self._way.partition(numbers[position])].append(position)
            stored = await asyncio.gather(
                *(self._group(where, [batch[position] for position in group]) for where, group in groups.items())
            )
            refused: dict[int, Partition] = {}
            for (where, group), answers in zip(groups.items(), stored, strict=True):
                for position, answer in zip(group, answers, strict=True):
                    (refused if answer < 0 else found)[position] = where
            await self._way.on_closed(list(dict.fromkeys(refused.values())))
            left = sorted(refused)
        return [(message.id, found[position]) for position, message in enumerate(batch)]

    def _numbers(self, batch: Sequence[TaskMessage]) -> list[int]:
        """Each message's number; those without a key take turns, slice by slice."""
        keyless = sum(message.number is None for message in batch)
        slices = min(self._way.width, max(1, keyless // _SLICE))
        length = max(1, -(-keyless // slices))
        turn, used = self._way.next_number(), 0
        numbers: list[int] = []
        for message in batch:
            if message.number is not None:
                numbers.append(message.number)
                continue
            if used == length:
                turn, used = self._way.next_number(), 0
            used += 1
            numbers.append(turn)
        return numbers

    async def _group(self, partition: Partition, messages: Sequence[TaskMessage]) -> list[int]:
        """Store messages of one partition, script after script."""
        answers: list[int] = []
        for start in range(0, len(messages), _SCRIPT_TASKS):
            answers += await self._store(partition, messages[start : start + _SCRIPT_TASKS])
        return answers

    async def _confirm(self, known: Mapping[Partition, Sequence[TaskMessage]]) -> None:
        """Of tasks that are stored already: have their replicas asked, where that matters. Nothing is stored."""
        for partition, messages in known.items() if self._replicated else ():
            await self._group(partition, messages)

    async def _store(self, partition: Partition, messages: Sequence[TaskMessage]) -> list[int]:
        records = [partition.record(message.id) for message in messages]
        args: list[Argument] = []
        if self._delay_ms > 0:
            args.append(self._delay_ms)
            for message in messages:
                args += (message.id, message.envelope, message.arguments)
            keys = [partition.due, partition.nudge, partition.closed, *records]
            script = _SCHEDULE
        else:
            for message in messages:
                args += (message.envelope, message.arguments)
            keys = [partition.ready, partition.closed, *records]
            script = _ENQUEUE
        if self._replicated:
            return await self._store_replicated(script, keys, args, partition, messages)
        answers: list[int] = await self._gateway.run(script, keys, args)
        return answers

    async def _store_replicated(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        partition: Partition,
        messages: Sequence[TaskMessage],
    ) -> list[int]:
        try:
            answers: list[int] = await self._gateway.run_replicated(script, keys, args, partition.mark)
        except NotReplicated as error:
            raise error.of_tasks([message.id for message in messages]) from None
        return answers

    async def _known(self, named: Mapping[int, tuple[str, int]]) -> dict[int, Partition]:
        """Of tasks whose ids are the caller's own (id and number, by position): where they are already.

        Nothing new comes into the closed partitions where it looks, so looking is enough.
        """
        places = [
            (position, partition, task_id)
            for position, (task_id, number) in named.items()
            for partition in self._way.closed_partitions(number)
        ]
        found = await self._gateway.pipeline([("EXISTS", where.record(task_id)) for _, where, task_id in places])
        return {position: where for (position, where, _), exists in zip(places, found, strict=True) if exists}


def _by_partition(known: Mapping[int, Partition], batch: Sequence[TaskMessage]) -> dict[Partition, list[TaskMessage]]:
    found: dict[Partition, list[TaskMessage]] = defaultdict(list)
    for position, partition in known.items():
        found[partition].append(batch[position])
    return found


class _Batch:
    """Entries that are gathered until there are enough of them."""

    __slots__ = ("messages", "size")

    def __init__(self) -> None:
        self.messages: list[TaskMessage] = []
        self.size = 0

    def add(self, message: TaskMessage, most: int) -> list[TaskMessage] | None:
        """Add an message; returns those before it where it is one too many, or too large to go with them."""
        weight = len(message.envelope) + len(message.arguments)
        self.size += weight
        if self.messages and (self.size > _SCRIPT_BYTES or len(self.messages) >= most):
            full, self.messages, self.size = self.messages, [message], weight
            return full
        self.messages.append(message)
        return None
