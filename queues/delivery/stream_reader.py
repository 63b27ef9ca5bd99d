"""Stream readers: blocking XREADGROUP over several partitions, never for more messages than there are free slots.

COUNT applies to each stream of an XREADGROUP, so the free slots are divided before it is known which partitions have
messages: each partition gets a share. On one server, one connection blocks on all partitions. In a cluster a command
stays in one hash slot, so each partition has a connection; when the first one returns messages, the other reads are
interrupted, and return what they have by then. A partition whose node is unavailable is left out for a while, so that
it does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ..errors import Unavailable
from ..keys import GROUP, Partition
from ..runtime import RUNTIME
from ..transport.blocking import BlockingConnection
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument

Stream = tuple[bytes, list[tuple[bytes, list[bytes] | None]]]
"""Key of a stream, and the entries that were read from it."""

_INTERRUPT_INTERVAL: Final = 0.02
"""Seconds after which a read is interrupted again: it may not have been blocking yet."""

_FIRST_ABSENCE: Final = 0.1
_MAX_ABSENCE: Final = 1.0
"""Seconds for which an unavailable partition is left out, the first time and after many."""

_GRACE: Final = 0.05
"""Seconds that the other reads have to return once one has."""

_SHORTEST_BLOCK: Final = 0.001
"""Smallest number of seconds for BLOCK, where 0 means for ever."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """Absence of a partition: its error, its length in seconds, and its end on the monotonic clock."""

    error: Unavailable
    delay: float
    until: float

    @property
    def left(self) -> float:
        return self.until - RUNTIME.monotonic()


class StreamReader(Protocol):
    """Reader of the ready and nudge streams of partitions, as one worker."""

    paused: Collection[str]
    """Queues of which only nudges are read."""

    @property
    def requested(self) -> float:
        """Monotonic time at which the oldest command was sent whose reply the last read returned."""
        ...

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        """Read up to `count` entries of each stream; block up to `block` seconds for the first, None: do not block."""
        ...

    async def interrupt(self) -> None:
        """End a blocking read."""
        ...

    def keep(self, partitions: Sequence[Partition]) -> None:
        """Set the partitions that are read from now on."""
        ...

    def is_away(self, partition: Partition) -> bool:
        """Return whether the partition was unavailable at its last read, while others are available."""
        ...

    def rests(self, partition: Partition) -> bool:
        """Return whether the partition is unavailable, and not to be tried again yet."""
        ...

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        """Mark a partition as unavailable. Return whether the others are read without it."""
        ...

    def returned(self) -> list[Partition]:
        """Return the partitions that became available since the last call."""
        ...

    async def close(self) -> None: ...


def _command(
    worker: str, partitions: Sequence[Partition], count: int, block: float | None, paused: Collection[str]
) -> tuple[Argument, ...]:
    """Return the command that reads partitions. paused: queues of which only nudges are read."""
    waiting: tuple[Argument, ...] = () if block is None else ("BLOCK", max(1, round(block * 1000)))
    streams = [stream for partition in partitions for stream in (partition.nudge, partition.ready)]
    if paused:
        left_out = {partition.ready for partition in partitions if partition.queue in paused}
        streams = [stream for stream in streams if stream not in left_out]
    return (
        "XREADGROUP",
        "GROUP",
        GROUP,
        worker,
        "COUNT",
        count,
        *waiting,
        "STREAMS",
        *streams,
        *(">" for _ in streams),
    )


class SingleNodeReader:
    """Reader for one server: one command for all partitions. Blocking reads have a separate connection."""

    def __init__(self, gateway: Gateway, reader: BlockingConnection, worker: str) -> None:
        self._gateway = gateway
        self._reader = reader
        self._worker = worker
        self.paused: Collection[str] = ()
        self.requested = RUNTIME.monotonic()

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        self.requested = RUNTIME.monotonic()
        command = _command(self._worker, partitions, count, block, self.paused)
        if block is None:
            return await self._gateway.command_now(*command) or []
        return await self._reader.read(*command) or []

    async def interrupt(self) -> None:
        await self._reader.interrupt()

    def keep(self, partitions: Sequence[Partition]) -> None:
        """Do nothing: there is one connection for all."""

    def is_away(self, partition: Partition) -> bool:
        """Return False: if the server is unavailable, all partitions are, and the read raises."""
        return False

    def rests(self, partition: Partition) -> bool:
        return False

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        return False

    def returned(self) -> list[Partition]:
        return []

    async def close(self) -> None:
        await self._reader.close()


class PerNodeReader:
    """Reader for a cluster: one command for each partition, and for blocking reads a connection to its node."""

    def __init__(self, gateway: Gateway, worker: str) -> None:
        self._gateway = gateway
        self._worker = worker
        self._readers: dict[Partition, BlockingConnection] = {}
        self._kept: set[Partition] = set()
        self._waiting: dict[asyncio.Task[Any], BlockingConnection] = {}
        self._absences: dict[Partition, _Absence] = {}
        self._returned: list[Partition] = []
        self._late: dict[Partition, tuple[asyncio.Future[Any], float]] = {}
        self.paused: Collection[str] = ()
        self.requested = RUNTIME.monotonic()

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        self.requested = RUNTIME.monotonic()
        await self._close_others()
        available = self._available(partitions)
        found = await self._poll(available, count) if available else []
        if found or block is None:
            return found
        available = self._available(partitions)
        if not available:
            return []
        soonest = min((absence.left for absence in self._absences.values()), default=block)
        return await self._wait(available, count, max(_SHORTEST_BLOCK, min(block, soonest)))

    def _available(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Return the partitions to read now. Raises the last error if all partitions are unavailable."""
        available = [partition for partition in partitions if not self.rests(partition)]
        if not available and self._absences.keys() >= self._kept:
            raise self._absences[partitions[0]].error
        return available

    def is_away(self, partition: Partition) -> bool:
        return partition in self._absences

    def rests(self, partition: Partition) -> bool:
        absence = self._absences.get(partition)
        return absence is not None and absence.left > 0

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        self._note(partition, error)
        return True

    def returned(self) -> list[Partition]:
        returned, self._returned = self._returned, []
        return returned

    def _note(self, partition: Partition, error: Unavailable | None) -> None:
        """Note whether a partition could be read. (An interrupted read shows neither.)"""
        before = self._absences.pop(partition, None)
        if error is not None:
            delay = _FIRST_ABSENCE if before is None else min(before.delay * 2, _MAX_ABSENCE)
            self._absences[partition] = _Absence(error, delay, RUNTIME.monotonic() + delay)
        elif before is not None:
            self._returned.append(partition)

    async def _poll(self, partitions: Sequence[Partition], count: int) -> list[Stream]:
        """Read all at once. A partition that does not answer soon counts as unavailable; its reply is used later."""
        asked = {
            partition: self._late.pop(partition) if partition in self._late else self._ask(partition, count)
            for partition in partitions
        }
        reads = {partition: read for partition, (read, _) in asked.items()}
        try:
            await asyncio.wait(reads.values(), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(reads.values(), timeout=_GRACE)
        except BaseException:
            await _cancel(reads.values())
            raise
        done = {partition: read for partition, read in reads.items() if read.done()}
        self.requested = min(asked[partition][1] for partition in done)
        for partition in reads.keys() - done.keys():
            self._late[partition] = asked[partition]
            self._note(partition, Unavailable(f"queue {partition.queue}, partition {partition.index} does not answer"))
        replies = await asyncio.gather(*done.values(), return_exceptions=True)
        for partition, reply in zip(done, replies, strict=True):
            self._note(partition, reply if isinstance(reply, Unavailable) else None)
        return self._streams(replies)

    def _ask(self, partition: Partition, count: int) -> tuple[asyncio.Future[Any], float]:
        command = _command(self._worker, [partition], count, None, self.paused)
        return asyncio.ensure_future(self._gateway.command_now(*command)), RUNTIME.monotonic()

    async def _wait(self, partitions: Sequence[Partition], count: int, block: float) -> list[Stream]:
        """Block on all at once. However this ends, no read is left behind that could take a message unseen."""
        self._waiting = {
            asyncio.ensure_future(reader.read(*_command(self._worker, [partition], count, block, self.paused))): reader
            for partition in partitions
            for reader in (self._reader(partition),)
        }
        reads = list(self._waiting)
        try:
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            while not all(read.done() for read in reads):
                await self.interrupt()
                await asyncio.wait(reads, timeout=_INTERRUPT_INTERVAL)
        finally:
            for read in reads:
                read.cancel()
            replies = await asyncio.gather(*reads, return_exceptions=True)
            self._waiting = {}
        for partition, reply in zip(partitions, replies, strict=True):
            if isinstance(reply, Unavailable):
                self._note(partition, reply)
        return self._streams(replies)

    def _streams(self, replies: Sequence[Any]) -> list[Stream]:
        """Return the messages of the reads. Raises an error if there are none, and not only some are unavailable."""
        found = [stream for reply in replies if not isinstance(reply, BaseException) for stream in reply or []]
        away = [reply for reply in replies if isinstance(reply, Unavailable)]
        errors = [reply for reply in replies if isinstance(reply, Exception) and not isinstance(reply, Unavailable)]
        if away and len(away) == len(replies) and self._absences.keys() >= self._kept:
            raise away[0]  # otherwise other partitions are read next
        if errors and not found:
            raise errors[0]  # if messages were found, the next read raises the same error
        return found

    def _reader(self, partition: Partition) -> BlockingConnection:
        found = self._readers.get(partition)
        if found is None:
            found = self._readers[partition] = self._gateway.blocking_connection(partition.ready)
        return found

    def keep(self, partitions: Sequence[Partition]) -> None:
        self._kept = set(partitions)

    async def _close_others(self) -> None:
        for partition in self._readers.keys() - (self._kept or self._readers.keys()):
            await self._readers.pop(partition).close()

    async def interrupt(self) -> None:
        readers = [reader for read, reader in self._waiting.items() if not read.done()]
        await asyncio.gather(*(reader.interrupt() for reader in readers))

    async def close(self) -> None:
        await _cancel([read for read, _ in self._late.values()])
        for reader in self._readers.values():
            await reader.close()
        self._readers.clear()


async def _cancel(futures: Collection[asyncio.Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def read_partitions(gateway: Gateway, worker: str) -> StreamReader:
    """Return the reader for this kind of server."""
    if gateway.clustered:
        return PerNodeReader(gateway, worker)
    return SingleNodeReader(gateway, gateway.blocking_connection(), worker)
