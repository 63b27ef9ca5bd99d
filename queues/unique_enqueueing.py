"""Enqueueing of unique tasks: claim the key, store the task, cancel the task that it replaces.

The marker of the key and the task are in different slots, so these are separate acts, and a producer may die between
any two of them:

1. The claim: the marker names a task that is not stored yet. Others wait for that task, at most for `CLAIM_MS`.
2. The task is stored, only while its producer has the claim (enqueue_one.lua): a producer that was stopped for longer
   stores nothing, so that no two tasks follow from two claims. From now on the record confirms the claim. If the task
   replaces one of the same partition, the same script adds the request to cancel that one.
3. The replaced task is cancelled, and the marker no longer names it. If a producer has died before, the next one of the
   key does that: or finds that the new task was never stored, and that the earlier one still has the key.

If the queue is full, the claim is given back before its producer waits for room. A task that replaces another one needs
no room.

A marker for a number of seconds is confirmed with one more write, since it outlasts the record of its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import orjson

from .enqueueing import BatchEnqueuer, KeyClaim
from .envelope import TaskMessage
from .errors import QueueError, QueueFull, TaskNotFound, Unavailable, UnreadableRecord
from .handle import CANCEL, Replacement, cancel_request, cancel_task
from .inspection.views import find_task
from .keys import MarkerKey, Namespace, Partition
from .records import Record, read_record
from .runtime import RUNTIME
from .transport.gateway import Gateway
from .unique import (
    CLAIM_MS,
    STORE_MS,
    KeyHolder,
    Marker,
    MarkerReply,
    Unique,
    decode_marker,
    encode_marker,
    holds,
    write_marker,
)

_FIRST_WAIT: Final = 0.002
_LONGEST_WAIT: Final = 0.1
"""Seconds between two looks at a claim whose task is not stored yet."""

_CLAIMS: Final = 3
"""Claims of one call that may end before its task is stored."""

_CONCURRENT: Final = 64
"""Keys of one call that are claimed at the same time."""


class UniqueStored(NamedTuple):
    """A task that is stored. existed: whether it was there before."""

    task_id: str
    partition: Partition
    existed: bool


class UniqueEnqueuer:
    """Storing of unique tasks in one queue.

    Args:
        delay: seconds until the tasks may run.
        retention: seconds for which the record of a replaced task is kept.
    """

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        queue: str,
        enqueuer: BatchEnqueuer,
        rule: Unique,
        *,
        delay: float,
        retention: float,
    ) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._queue = queue
        self._enqueuer = enqueuer
        self._rule = rule
        self._delay = delay
        self._retention = retention

    async def all(self, messages: Sequence[tuple[str, TaskMessage]]) -> tuple[list[UniqueStored], QueueFull | None]:
        """Store messages with the digests of their keys, those of a key in turn; all if some have an ordering key.

        Return the tasks that are stored, and the error of the others if there was no room for them.
        """
        groups: dict[str, list[int]] = {}
        ordered = any(_has_ordering_key(message) for _, message in messages)
        for number, (digest, _) in enumerate(messages):
            groups.setdefault("" if ordered else digest, []).append(number)
        found: dict[int, UniqueStored] = {}
        full: list[QueueFull] = []
        limit = asyncio.Semaphore(_CONCURRENT)

        async def store(numbers: Sequence[int]) -> None:
            async with limit:
                for number in numbers:
                    if full:
                        return
                    try:
                        found[number] = await self.one(*messages[number])
                    except QueueFull as error:
                        full.append(error)

        storing = [asyncio.create_task(store(numbers)) for numbers in groups.values()]
        try:
            await asyncio.gather(*storing)
        finally:
            for task in storing:
                task.cancel()
            await asyncio.gather(*storing, return_exceptions=True)
        return [found[number] for number in sorted(found)], full[0] if full else None

    async def one(self, digest: str, message: TaskMessage) -> UniqueStored:
        """Store one message under the digest of its key, or find the task that has the key.

        Raises:
            QueueError: The task could not be stored within its claims: clocks differ, or this process was stopped.
            QueueFull: There is no room for it.
        """
        if message.own_id and (known := await self._find(message.id)) is not None:
            self._enqueuer.note_known(known, message)
            return UniqueStored(message.id, known, True)
        place, keyless = self._namespace.unique(digest), message.number is None
        message, index = await self._enqueuer.numbered(message)
        own, former, waiting, ended = KeyHolder(message.id, index), None, _Waiting(), 0
        claim = await self._claim(place, own, None, b"")
        while True:
            if claim.answer.taken:
                try:
                    partition = await self._store(message, claim.answer.now, former, keyless=keyless)
                except QueueFull:
                    await write_marker(self._gateway, place, b"", claim.raw, 0)
                    await self._enqueuer.find_room()
                    claim = await self._claim(place, own, None, b"")
                    continue
                if partition is not None:
                    await self._confirm(place, claim, KeyHolder(message.id, partition.index), former)
                    return UniqueStored(message.id, partition, False)
                ended += 1
                if ended == _CLAIMS:
                    raise QueueError(
                        f"could not store task {message.id} within {STORE_MS / 1000:g} s of its claim of a unique key; "
                        "compare the clocks of the servers; nothing was enqueued"
                    )
                claim = await self._claim(place, own, None, b"")
                continue
            held = await self._look(place, message.id, claim.answer, respect_claim=waiting.respects)
            if held is None:
                await waiting.wait()
                claim = await self._claim(place, own, None, b"")
                continue
            if held.holds and self._rule.keep == "first":
                return UniqueStored(held.task.task_id, held.partition, True)
            former = held.task if held.holds else None
            claim = await self._claim(place, own, former, claim.answer.held)

    async def _look(self, place: MarkerKey, own: str, answer: MarkerReply, *, respect_claim: bool) -> _Held | None:
        """Return which task has a key, by its marker and the task's record; None while the task may still be stored."""
        marker = decode_marker(self._gateway, place, answer.held) if answer.held else None
        if marker is None:
            return _Held(KeyHolder("", 0), self._namespace.partition(self._queue), holds=False)
        holder = marker.holder
        partition, record = await self._read(holder)
        # a claim for the id of this call has ended, or is that of a call before it
        if record is None and holder.task_id != own and respect_claim and marker.claimed(answer.now):
            return None
        if marker.former is not None and record is None and not marker.stored:
            holder = marker.former  # the task that replaces it was never stored
            partition, record = await self._read(holder)
        elif marker.former is not None and record is not None:
            await self._cancel(marker.former, holder.task_id)  # the producer has died before
        found = KeyHolder(holder.task_id, partition.index)
        return _Held(found, partition, holds=holds(self._rule, marker, record, answer.now))

    async def _read(self, task: KeyHolder) -> tuple[Partition, Record | None]:
        """Read the record of a task; None if it is not there, or damaged."""
        partition = self._namespace.partition(self._queue, task.partition)
        with suppress(UnreadableRecord):
            record = await read_record(self._gateway, partition, task.task_id)
            if record is None and (other := await self._find(task.task_id)) is not None:
                return other, await read_record(self._gateway, other, task.task_id)
            return partition, record
        return partition, None

    async def _find(self, task_id: str) -> Partition | None:
        return await find_task(self._gateway, self._namespace, task_id, self._queue)

    async def _claim(self, place: MarkerKey, own: KeyHolder, former: KeyHolder | None, read: bytes) -> _Claimed:
        """Claim a key for a task, if its marker is what the caller has read: the script compares it."""
        marker = Marker(0, own, self._rule.span, former=former, claim=RUNTIME.token(4))
        data = encode_marker(self._gateway, place, marker)
        answer = await write_marker(self._gateway, place, data, read, marker.kept_ms(self._delay))
        return _Claimed(answer, b"%d %b" % (answer.now, data))

    async def _store(
        self, message: TaskMessage, claimed_at: int, former: KeyHolder | None, *, keyless: bool
    ) -> Partition | None:
        """Store the task of a claim, and cancel the one that it replaces. None if the claim has ended."""
        claim = KeyClaim(claimed_at + STORE_MS)
        if former is not None and keyless:
            beside = self._namespace.partition(self._queue, former.partition)
            request = await cancel_request(self._gateway, beside, former.task_id, self._replacement(message.id))
            claim = KeyClaim(claimed_at + STORE_MS, beside, request)
        partition = await self._enqueuer.claimed(message, claim, replaces=former is not None)
        if partition is not None and former is not None:
            with suppress(Unavailable):  # the request does it, or the next producer of the key
                await self._cancel(former, message.id)
                if partition == claim.beside and CANCEL not in self._gateway.denied:
                    await self._gateway.command("ZREM", partition.due, claim.request)
        return partition

    async def _cancel(self, former: KeyHolder, by: str) -> None:
        """Cancel a task that another one has replaced. Idempotent."""
        partition = self._namespace.partition(self._queue, former.partition)
        replacement = self._replacement(by)
        with suppress(TaskNotFound):
            await cancel_task(
                self._gateway, partition, former.task_id, retention=self._retention, replacement=replacement
            )

    def _replacement(self, by: str) -> Replacement:
        return Replacement(by, unstarted=self._rule.during == "while_queued")

    async def _confirm(self, place: MarkerKey, claim: _Claimed, own: KeyHolder, former: KeyHolder | None) -> None:
        """Note in the marker that the task is stored, and its place, if its record alone does not confirm the claim."""
        if former is None and isinstance(self._rule.during, str):
            return
        marker = Marker(0, own, self._rule.span, stored=True)
        data = encode_marker(self._gateway, place, marker)
        with suppress(Unavailable):  # until its record expires, that confirms the claim
            await write_marker(self._gateway, place, data, claim.raw, marker.kept_ms(self._delay), since_read=True)


class _Claimed(NamedTuple):
    """Outcome of a claim. raw: the marker as it is stored if the key was taken."""

    answer: MarkerReply
    raw: bytes


class _Held(NamedTuple):
    """The task that a marker leads to. holds: whether it has the key."""

    task: KeyHolder
    partition: Partition
    holds: bool


class _Waiting:
    """The waits of one call for a claim whose task is not stored yet."""

    def __init__(self) -> None:
        self._started = RUNTIME.monotonic()
        self._pause = _FIRST_WAIT

    @property
    def respects(self) -> bool:
        """Whether the call still waits: a clock of Redis that was set back does not prolong it."""
        return RUNTIME.monotonic() - self._started < 2 * CLAIM_MS / 1000

    async def wait(self) -> None:
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_WAIT)


def _has_ordering_key(message: TaskMessage) -> bool:
    return message.number is not None and orjson.loads(message.envelope).get("key") is not None
