"""Storing of tasks: many in few round trips, each in the partition of its key.

Tasks of one key that come in one call are stored in one stream, in the order in which they came. So two scripts for one
partition never run at the same time: a batch has one script per partition, and the next batch is sent when this one is
stored. The next batch is prepared meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from .envelope import TaskMessage
from .errors import NotReplicated, QueueFull, StillRunning
from .keys import Partition, gate_of
from .lanes import NORMAL, Lane
from .partitions.router import PartitionRouter
from .runtime import RUNTIME
from .transport.gateway import Gateway
from .transport.large_values import store_with_upload
from .transport.pipelining import Argument, Command
from .transport.scripts import Script, queue_script

_RESET = queue_script("reset_task")
_ENQUEUE = queue_script("enqueue")
_SCHEDULE = queue_script("schedule")
_ENQUEUE_ONE = queue_script("enqueue_one")
DEPTH = queue_script("queue_depth")
"""Script that reads the depth of a partition, see depth.py. Workers load it for producers with fewer rights."""
_ENQUEUE_LIMITED = queue_script("enqueue_limited")

_NO_NAMES: Final = ("", "")

_CLOSED: Final = -1
_ENDED: Final = -2
_FULL: Final = -3
"""Answers of the scripts that nothing is stored: the partition is closed, the claim has ended, too many tasks wait."""

_SCRIPT_BYTES: Final = 4 * 1024 * 1024
"""Largest size of one script's messages, so that other clients do not wait long for it."""

_SCRIPTS: Final = 4
"""Full scripts that make a batch, if the queue has so many partitions."""


@dataclass(frozen=True)
class BatchLimits:
    """Numbers of tasks that are stored together.

    Args:
        script: at most in one script, so that other clients do not wait long for it.
        together: tasks without a key that go to one partition, so that each script carries many.
    """

    script: int = 500
    together: int = 50


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A claim of a unique key, under which one task is stored.

    until: end of the claim, in milliseconds of Redis' clock. beside: partition of the task that this one replaces, None
    without one. request: request to cancel that task, see handle.py.
    """

    until: int
    beside: Partition | None = None
    request: bytes = b""


class Room(Protocol):
    """Protocol of what finds room in a queue with a limit of its depth, for the tasks of one call; see depth.py."""

    async def first(self, partition: Partition) -> int:
        """Return the number of waiting tasks from which on the first script of a partition stores none."""
        ...

    async def next(self, partition: Partition) -> int | None:
        """Return the number after a script without room; None if the wait for room is over."""
        ...

    async def is_there(self) -> bool:
        """Return whether there is room now."""
        ...

    async def wait(self) -> bool:
        """Wait for a moment; return False if the wait is over."""
        ...

    def stored(self, partition: Partition, count: int) -> None:
        """Note that tasks were stored."""
        ...

    def full(self) -> QueueFull:
        """Return the error of a call for which there is no room."""
        ...


class BatchEnqueuer:
    """Storing of messages in one queue.

    Args:
        delay: Seconds until the tasks may run.
        replicated: Whether replicas must have the tasks before a call returns. If too few have them in time, it raises
            `NotReplicated` with the ids of the tasks.
        room: Finds room in a queue with a limit of its depth; None without a limit.
    """

    limits: ClassVar[BatchLimits] = BatchLimits()
    """Limits of all batches of this process; tests lower them."""

    def __init__(
        self,
        gateway: Gateway,
        router: PartitionRouter,
        delay: float,
        *,
        replicated: bool = False,
        room: Room | None = None,
    ) -> None:
        self._gateway = gateway
        self._router = router
        self._delay_ms = round(delay * 1000)
        self._replicated = replicated
        self._room = room
        self._full = False
        self._known: list[tuple[Partition, TaskMessage]] = []

    def take_known(self) -> list[tuple[Partition, TaskMessage]]:
        """Return the messages since the last call that were not stored, since tasks with their ids are, and where."""
        known, self._known = self._known, []
        return known

    def note_known(self, partition: Partition, message: TaskMessage) -> None:
        """Note a message that is not to be stored, since a task with its id is in a partition."""
        self._known.append((partition, message))

    async def one(self, message: TaskMessage) -> Partition:
        """Store one task; return its partition. Raises `QueueFull`."""

        router = self._router.of(message.lane)

        async def store(partition: Partition) -> bool:
            answer = (await self._store(partition, [message]))[0]
            if answer == _FULL and self._room is not None:
                raise self._room.full()
            if answer == 0:
                self._known.append((partition, message))
            return answer >= 0

        async def find(others: Sequence[Partition]) -> Partition | None:
            found = await self._find(router, [(0, partition, message.id) for partition in others])
            await self._confirm(_by_partition(found, [message]))
            self._known += [(partition, message) for partition in found.values()]
            return found.get(0)

        async def find_or_keep(others: Sequence[Partition]) -> Partition | None:
            if message.own_id and (known := await find(others)) is not None:
                return known
            return await _first_that_takes(store, [partition for partition in others if router.is_closed(partition)])

        look = find if message.own_id else None
        return await router.place(message.number, store, find_or_keep if message.ordered else look)

    async def find_room(self) -> None:
        """Look for room after a task had none, or wait for a moment. Raises `QueueFull`."""
        if self._room is not None and not await self._room.is_there() and not await self._room.wait():
            raise self._room.full()

    async def claimed(self, message: TaskMessage, claim: KeyClaim, *, replaces: bool = False) -> Partition | None:
        """Store one task under a claim; return its partition, None if the claim has ended.

        replaces: whether it replaces another task, and so needs no room. Raises `QueueFull` at once, without a wait for
        room: a claim is held for seconds only.
        """
        ended = False

        async def store(partition: Partition) -> bool:
            nonlocal ended
            room = None if replaces else self._room
            most = None if room is None else await room.first(partition)
            (answer,) = await self._store_one(partition, message, claim, most)
            if answer == _FULL and room is not None:
                raise room.full()
            ended = answer == _ENDED
            if answer == 0 and message.own_id:
                self._known.append((partition, message))
            return answer >= 0 or ended

        router = self._router.of(message.lane)
        await router.refresh()
        beside = claim.beside
        if beside is not None and router.takes(beside) and await store(beside):
            return None if ended else beside
        find = partial(_first_that_takes, store) if message.ordered else None
        found = await router.place(message.number, store, find)
        return None if ended else found

    async def numbered(self, message: TaskMessage) -> tuple[TaskMessage, int]:
        """Return a message with the number of its partition, and the index of the partition where it belongs now."""
        router = self._router.of(message.lane)
        await router.refresh()
        number = router.next_number() if message.number is None else message.number
        return message._replace(number=number), router.partition(number).index

    async def fresh(self, message: TaskMessage, check: Callable[[Partition], Awaitable[None]]) -> Partition:
        """Store one task in the place of an ended one with the same id; return its partition.

        Args:
            check: Raises if the earlier task in a partition must stay.

        Raises:
            StillRunning: The earlier task has not ended.
        """
        token, router = RUNTIME.token(8), self._router.of(message.lane)

        async def store(partition: Partition) -> bool:
            return await self._reset(partition, message, token, check)

        async def reset(others: Sequence[Partition]) -> Partition | None:
            for partition in others:
                known = router.is_closed(partition) or await self._gateway.command(
                    "EXISTS", partition.record(message.id)
                )  # a task stays in its lane
                if known and await self._reset(partition, message, token, check):
                    return partition  # the server has lost that it was closed, or it is of another lane
            return None

        return await router.place(message.number, store, reset)

    async def _reset(
        self,
        partition: Partition,
        message: TaskMessage,
        token: str,
        check: Callable[[Partition], Awaitable[None]],
    ) -> bool:
        """Delete what an ended task left, and store the new one. False if the partition is closed: only deleted."""
        keys = [
            partition.ready,
            partition.closed,
            partition.record(message.id),
            partition.steps(message.id),
            partition.log(message.id),
            partition.dead,
            partition.inbox(message.id),
            partition.timeline,
        ]
        answer = b"changed"
        while answer == b"changed":  # another call replaced the task after it was read
            found = await self._gateway.command("HMGET", partition.record(message.id), "finished", "token", "replays")
            await check(partition)  # of what was read: the script compares it
            args = (message.envelope, message.arguments, token, message.id, *(value or b"" for value in found))
            reset = partial(self._replace, keys, args)
            answer = await store_with_upload(self._gateway, partition, message.large, reset)
        if answer not in (b"stored", b"closed"):
            raise StillRunning(message.id, answer.decode(), self._gateway.address.shown)
        return answer == b"stored"

    async def _replace(self, keys: Sequence[str], args: Sequence[Argument], uploads: Sequence[str]) -> Any:
        return await self._gateway.run(_RESET, [*keys, *uploads], args)

    async def all(
        self, messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage]
    ) -> AsyncGenerator[list[tuple[str, Partition]]]:
        """Store tasks batch by batch; yield the ids and partitions of each stored batch, in order.

        Raises `QueueFull`.
        """
        await self._router.refresh()
        storing: asyncio.Task[list[tuple[str, Partition]]] | None = None
        try:
            async for batch in self._batches(messages):
                if storing is not None:
                    yield await storing
                    self._check_room()
                storing = asyncio.create_task(self._batch(batch))
                await asyncio.sleep(0)  # sends it now, before the next one is prepared
            if storing is not None:
                yield await storing
                self._check_room()
        finally:
            if storing is not None:
                storing.cancel()
                await asyncio.gather(storing, return_exceptions=True)

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
        return self.limits.script * min(self._router.width, _SCRIPTS)

    async def _batch(self, batch: Sequence[TaskMessage]) -> list[tuple[str, Partition]]:
        """Store messages of one lane, those of each partition in order; return ids and partitions of stored ones."""
        router = self._router.of(batch[0].lane)
        await router.refresh()
        if (only := router.only) is not None and not (router.shares_ids and any(message.own_id for message in batch)):
            answers = await self._store(only, batch)
            if min(answers) >= 0:
                self._known += [(only, message) for message, answer in zip(batch, answers, strict=True) if answer == 0]
                return [(message.id, only) for message in batch]
            if _CLOSED not in answers:
                self._full = True
                self._known += [(only, message) for message, answer in zip(batch, answers, strict=True) if answer == 0]
                return [(message.id, only) for message, answer in zip(batch, answers, strict=True) if answer != _FULL]
        numbers = self._numbers(router, batch)
        found: dict[int, Partition] = {}
        full: dict[int, Partition] = {}  # partitions without room
        left: Sequence[int] = range(len(batch))
        while left:
            known = await self._find(
                router,
                [
                    (position, partition, batch[position].id)
                    for position in left
                    if batch[position].own_id
                    for partition in router.other_partitions(numbers[position])
                ],
            )
            await self._confirm(_by_partition(known, batch))
            self._known += [(partition, batch[position]) for position, partition in known.items()]
            found |= known
            new = [position for position in left if position not in found]
            found |= await self._kept_in_closed(router, batch, new, numbers, full)
            groups: dict[Partition, list[int]] = defaultdict(list)
            for position in left:
                if position not in found and position not in full:
                    groups[router.partition(numbers[position])].append(position)
            stored = await asyncio.gather(
                *(self._group(where, [batch[position] for position in group]) for where, group in groups.items())
            )
            refused: dict[int, Partition] = {}
            for (where, group), answers in zip(groups.items(), stored, strict=True):
                for position, answer in zip(group, answers, strict=True):
                    (found if answer >= 0 else full if answer == _FULL else refused)[position] = where
                    if answer == 0:
                        self._known.append((where, batch[position]))
            await router.on_closed(list(dict.fromkeys(refused.values())))
            left = sorted(refused)
        self._full = self._full or bool(full)
        return [(message.id, found[position]) for position, message in enumerate(batch) if position not in full]

    def _check_room(self) -> None:
        """Raise `QueueFull` if some messages of the last batch were not stored for lack of room."""
        if self._full and self._room is not None:
            raise self._room.full()

    async def _kept_in_closed(
        self,
        router: PartitionRouter,
        batch: Sequence[TaskMessage],
        left: Sequence[int],
        numbers: Sequence[int],
        full: dict[int, Partition],
    ) -> dict[int, Partition]:
        """Store tasks of ordered keys in closed partitions that have tasks of these keys; return those, by position.

        full: gets those for which there is no room.
        """
        found: dict[int, Partition] = {}
        without_room: dict[int, Partition] = {}
        for position in left:
            message = batch[position]
            if message.ordered and (where := without_room.get(numbers[position])) is not None:
                full[position] = where  # no later task of a key before an earlier one
                continue
            for partition in router.closed_partitions(numbers[position]) if message.ordered else ():
                (answer,) = await self._store(partition, [message])
                if answer == _FULL:
                    full[position] = without_room[numbers[position]] = partition
                    break
                if answer >= 0:
                    found[position] = partition
                    if answer == 0:
                        self._known.append((partition, message))
                    break
        return found

    def _numbers(self, router: PartitionRouter, batch: Sequence[TaskMessage]) -> list[int]:
        """Return the number of each message; those without a key are distributed slice by slice."""
        keyless = sum(message.number is None for message in batch)
        slices = min(router.width, max(1, keyless // self.limits.together))
        length = max(1, -(-keyless // slices))
        number, used = router.next_number(), 0
        numbers: list[int] = []
        for message in batch:
            if message.number is not None:
                numbers.append(message.number)
                continue
            if used == length:
                number, used = router.next_number(), 0
            used += 1
            numbers.append(number)
        return numbers

    async def _group(self, partition: Partition, messages: Sequence[TaskMessage]) -> list[int]:
        """Store messages in one partition, script after script."""
        answers: list[int] = []
        for start in range(0, len(messages), self.limits.script):
            if _FULL in answers:  # later tasks must not be stored before these
                answers += [_FULL] * (len(messages) - start)
                break
            answers += await self._store(partition, messages[start : start + self.limits.script])
        return answers

    async def _confirm(self, known: Mapping[Partition, Sequence[TaskMessage]]) -> None:
        """Wait for the replicas of tasks that are stored already, if they must have them."""
        for partition, messages in known.items() if self._replicated else ():
            await self._group(partition, messages)

    async def _store(self, partition: Partition, messages: Sequence[TaskMessage]) -> list[int]:
        """Store messages, and wait for room if the call waits; return the answer for each.

        If no room was found, those that have none were not stored.
        """
        if self._room is None:
            return await self._send(partition, messages)
        answers = await self._send(partition, messages, await self._room.first(partition))
        self._note_stored(partition, answers)
        while left := [position for position, answer in enumerate(answers) if answer == _FULL]:
            number = await self._room.next(partition)
            if number is None:
                break
            again = await self._send(partition, [messages[position] for position in left], number)
            self._note_stored(partition, again)
            for position, answer in zip(left, again, strict=True):
                answers[position] = answer
        return answers

    def _note_stored(self, partition: Partition, answers: Sequence[int]) -> None:
        if self._room is not None and (count := answers.count(1)):
            self._room.stored(partition, count)

    async def _send(self, partition: Partition, messages: Sequence[TaskMessage], most: int | None = None) -> list[int]:
        """Store messages with one script; each with large arguments with one of its own.

        most: number of waiting tasks from which on the scripts store none.
        """
        large = [position for position, message in enumerate(messages) if message.large is not None]
        if large:
            return await self._store_each(partition, messages, large, most)
        records = [partition.record(message.id) for message in messages]
        args: list[Argument] = []
        if self._delay_ms > 0:
            args.append(self._delay_ms)
            for message in messages:
                args += (message.id, message.envelope, message.arguments)
            keys = [partition.due, partition.nudge, partition.closed, partition.timeline, partition.ready, *records]
            script = _SCHEDULE
        elif any(message.limits for message in messages):
            keys, args = _in_lists(partition, messages, records)
            script = _ENQUEUE_LIMITED
        else:
            for message in messages:
                args += (message.id, message.envelope, message.arguments, *(message.names or _NO_NAMES))
            keys = [partition.ready, partition.closed, partition.timeline, *records]
            script = _ENQUEUE
        if most is not None:
            args.append(most)
        if self._replicated:
            answers: list[int] = await self._store_replicated(script, keys, args, partition, messages)
        else:
            answers = await self._gateway.run(script, keys, args)
        return answers

    async def _store_each(
        self, partition: Partition, messages: Sequence[TaskMessage], large: Sequence[int], most: int | None
    ) -> list[int]:
        """Store messages of which some have large arguments, in order."""
        answers: list[int] = []
        start = 0
        for position in [*large, len(messages)]:
            if start < position:
                answers += await self._send(partition, messages[start:position], most)
            if position < len(messages) and _FULL not in answers:
                answers += await self._store_one(partition, messages[position], most=most)
            if _FULL in answers:
                return answers + [_FULL] * (len(messages) - len(answers))
            start = position + 1
        return answers

    async def _store_one(
        self, partition: Partition, message: TaskMessage, claim: KeyClaim | None = None, most: int | None = None
    ) -> list[int]:
        """Store a message with large arguments, or one under a claim: only in the partition of a request to cancel."""
        until: int | str = "" if claim is None else claim.until
        request = claim.request if claim is not None and claim.beside == partition else b""
        gate, replaces = _gate(message)
        args: list[Argument] = [message.id, message.envelope, message.arguments, max(0, self._delay_ms), until, request]
        args += (*gate, replaces, *([] if most is None else [most]))
        record = partition.record(message.id)
        keys = [partition.ready, partition.closed, partition.timeline, record, partition.due, partition.nudge]
        line = [partition.limited(gate[0]), partition.turns(gate[1]), partition.rings] if message.limits else []

        async def store(uploads: Sequence[str]) -> Any:
            named = [*keys, *(uploads or [record]), *line]
            if self._replicated:
                return await self._store_replicated(_ENQUEUE_ONE, named, args, partition, [message])
            return await self._gateway.run(_ENQUEUE_ONE, named, args)

        answer: int = await store_with_upload(self._gateway, partition, message.large, store)
        return [answer]

    async def _store_replicated(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        partition: Partition,
        messages: Sequence[TaskMessage],
    ) -> Any:
        try:
            answers = await self._gateway.run_replicated(script, keys, args, partition.mark)
        except NotReplicated as error:
            answers = error.reply
            each: list[Any] = answers if isinstance(answers, list) else [-1 if answers is None else answers]
            # A closed partition has stored nothing; the router finds another one for these tasks.
            stored = [message.id for message, answer in zip(messages, each, strict=True) if answer >= 0]
            if stored:
                raise error.of_tasks(stored) from None
        return answers

    async def _find(
        self, router: PartitionRouter, places: Sequence[tuple[int, Partition, str]]
    ) -> dict[int, Partition]:
        """Return the other partitions that tasks are in already, by position.

        Nothing new comes into a closed partition, so a read is enough. A partition whose mark the server has lost takes
        tasks again. Two calls at the same time that give one id different priorities may both store a task.

        Args:
            places: Position of a task in its batch, a partition that is closed or of another lane, and the task's id.
        """
        if not places:
            return {}
        others = list(dict.fromkeys(where for _, where, _ in places))
        reads: list[Command] = [("EXISTS", where.record(task_id)) for _, where, task_id in places]
        found = await self._gateway.pipeline([*reads, *(("HEXISTS", where.closed, "last") for where in others)])
        known, marks = found[: len(reads)], found[len(reads) :]
        router.reopen([where for where, mark in zip(others, marks, strict=True) if not mark])
        return {position: where for (position, where, _), exists in zip(places, known, strict=True) if exists}


async def _first_that_takes(
    store: Callable[[Partition], Awaitable[bool]], partitions: Sequence[Partition]
) -> Partition | None:
    """Store a task in the first partition that takes it; return that."""
    for partition in partitions:
        if await store(partition):
            return partition
    return None


def _gate(message: TaskMessage) -> tuple[tuple[str, str], str]:
    """Return where a message waits for its limits, and `1` if it replaces those that wait there."""
    if not message.limits:
        return ("", ""), ""
    return gate_of(message.limits), "1" if any("r" in use.flags for use in message.limits) else ""


def _in_lists(
    partition: Partition, messages: Sequence[TaskMessage], records: Sequence[str]
) -> tuple[list[str], list[Argument]]:
    """Return keys and arguments of the script that stores messages of which some have limits."""
    keys = [partition.ready, partition.closed, partition.timeline, partition.due, partition.nudge, partition.rings]
    args: list[Argument] = [len(messages)]
    lines: dict[str, None] = {}
    for message in messages:
        gate, replaces = _gate(message)
        args += (message.id, message.envelope, message.arguments, *gate, replaces)
        if message.limits:
            lines |= {partition.limited(gate[0]): None, partition.turns(gate[1]): None}
    return [*keys, *records, *lines], args


def _by_partition(known: Mapping[int, Partition], batch: Sequence[TaskMessage]) -> dict[Partition, list[TaskMessage]]:
    found: dict[Partition, list[TaskMessage]] = defaultdict(list)
    for position, partition in known.items():
        found[partition].append(batch[position])
    return found


class _Batch:
    """Messages that are collected until they fill a batch."""

    __slots__ = ("lane", "messages", "size")

    def __init__(self) -> None:
        self.messages: list[TaskMessage] = []
        self.size = 0
        self.lane: Lane = NORMAL

    def add(self, message: TaskMessage, most: int) -> list[TaskMessage] | None:
        """Add a message. If it does not fit into the batch, which has one lane, return that and start the next."""
        size = len(message.envelope) + len(message.arguments)
        if message.large is not None:
            size += message.large.reference.size
        self.size += size
        lane, self.lane = self.lane, message.lane
        if self.messages and (self.size > _SCRIPT_BYTES or len(self.messages) >= most or lane != self.lane):
            full, self.messages, self.size = self.messages, [message], size
            return full
        self.messages.append(message)
        return None
