"""The blocking read of several partitions at once, never for more messages than there is room for.

COUNT holds for each stream of an XREADGROUP, so the room is dealt out before it is known who has messages: each
partition gets a share, and the shares never sum to more. On one server, one connection waits for all partitions. In a
cluster a command stays in one slot, so each partition has a connection; when the first has brought something, the
others are told to come back, with what they may have by then. A partition whose node is away is left out for a while,
so that it holds up no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ..errors import Unavailable
from ..keys import GROUP, Partition
from ..transport import Argument, BlockingConnection, Gateway

__all__ = ["PerNodeReader", "SingleNodeReader", "Stream", "StreamReader", "read_partitions"]

Stream = tuple[bytes, list[tuple[bytes, list[bytes] | None]]]
"""A stream's key, and the entries that came from it."""

_INSIST: Final = 0.02
"""Seconds after which a read that was told to come back is told again: it may not have been waiting yet."""


_FIRST_ABSENCE: Final = 0.1
_LONGEST_ABSENCE: Final = 1.0
"""Seconds for which a partition that could not be read is left out, the first time and after many."""

_LATE: Final = 0.05
"""Seconds that the others have to answer once one has."""

_SHORTEST: Final = 0.001
"""Seconds that a read waits at least: 0 would mean without end."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """Why a partition is left out, for how long (seconds) and until when (monotonic clock)."""

    error: Unavailable
    delay: float
    until: float

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


class StreamReader(Protocol):
    """Reads from ready and nudge streams of partitions, as one worker."""

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        """Up to `count` entries from each stream; waits up to `block` seconds for the first, None for not at all."""

    async def interrupt(self) -> None:
        """End a read that waits."""

    def keep(self, partitions: Sequence[Partition]) -> None:
        """From now on no others are read."""

    def is_away(self, partition: Partition) -> bool:
        """Whether the partition could not be reached when it was tried last, while others are."""

    def rests(self, partition: Partition) -> bool:
        """Whether it is away, and not to be tried again yet."""

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        """The partition could not be reached; whether it is left out for that, and the others go on."""

    def returned(self) -> list[Partition]:
        """Those that could be read again since this was asked last."""

    async def close(self) -> None: ...


def _command(worker: str, partitions: Sequence[Partition], count: int, block: float | None) -> tuple[Argument, ...]:
    waiting: tuple[Argument, ...] = () if block is None else ("BLOCK", max(1, round(block * 1000)))
    streams = [stream for partition in partitions for stream in (partition.nudge, partition.ready)]
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
    """One server: one command. One that may wait has a connection of its own; others go out with everything else."""

    def __init__(self, gateway: Gateway, reader: BlockingConnection, worker: str) -> None:
        self._gateway = gateway
        self._reader = reader
        self._worker = worker

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        command = _command(self._worker, partitions, count, block)
        if block is None:
            return await self._gateway.command_now(*command) or []
        return await self._reader.read(*command) or []

    async def interrupt(self) -> None:
        await self._reader.interrupt()

    def keep(self, partitions: Sequence[Partition]) -> None:
        """There is one connection for all."""

    def is_away(self, partition: Partition) -> bool:
        """All are, or none is; then the read says so."""
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
    """A cluster: a command for each partition, and for one that may wait a connection to the node that has it."""

    def __init__(self, gateway: Gateway, worker: str) -> None:
        self._gateway = gateway
        self._worker = worker
        self._readers: dict[Partition, BlockingConnection] = {}
        self._kept: set[Partition] = set()
        self._waiting: dict[asyncio.Task[Any], BlockingConnection] = {}
        self._absences: dict[Partition, _Absence] = {}
        self._returned: list[Partition] = []
        self._late: dict[Partition, asyncio.Future[Any]] = {}

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        await self._close_others()
        here = self._here(partitions)
        found = await self._look(here, count) if here else []
        if found or block is None:
            return found
        here = self._here(partitions)
        if not here:
            return []
        soonest = min((absence.left for absence in self._absences.values()), default=block)
        return await self._wait(here, count, max(_SHORTEST, min(block, soonest)))

    def _here(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Those that may be asked now. Raises the last error where all that are read are away."""
        here = [partition for partition in partitions if not self.rests(partition)]
        if not here and self._absences.keys() >= self._kept:
            raise self._absences[partitions[0]].error
        return here

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
        """Remember that a partition could not be read, or that it could. (A read that was interrupted says neither.)"""
        before = self._absences.pop(partition, None)
        if error is not None:
            delay = _FIRST_ABSENCE if before is None else min(before.delay * 2, _LONGEST_ABSENCE)
            self._absences[partition] = _Absence(error, delay, time.monotonic() + delay)
        elif before is not None:
            self._returned.append(partition)

    async def _look(self, partitions: Sequence[Partition], count: int) -> list[Stream]:
        """Ask all at once. Who does not answer soon, because its slot is sought, counts as away, and is heard later."""
        looks = {
            partition: self._late.pop(partition) if partition in self._late else self._ask(partition, count)
            for partition in partitions
        }
        try:
            await asyncio.wait(looks.values(), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(looks.values(), timeout=_LATE)
        except BaseException:
            await _cancel(looks.values())
            raise
        done = {partition: look for partition, look in looks.items() if look.done()}
        for partition in looks.keys() - done.keys():
            self._late[partition] = looks[partition]
            self._note(partition, Unavailable(f"queue {partition.queue}, partition {partition.index} does not answer"))
        replies = await asyncio.gather(*done.values(), return_exceptions=True)
        for partition, reply in zip(done, replies, strict=True):
            self._note(partition, reply if isinstance(reply, Unavailable) else None)
        return self._streams(replies)

    def _ask(self, partition: Partition, count: int) -> asyncio.Future[Any]:
        command = _command(self._worker, [partition], count, None)
        return asyncio.ensure_future(self._gateway.command_now(*command))

    async def _wait(self, partitions: Sequence[Partition], count: int, block: float) -> list[Stream]:
        """Wait on all at once. However this ends, no read is left behind that could take a message unheard."""
        self._waiting = {
            asyncio.ensure_future(reader.read(*_command(self._worker, [partition], count, block))): reader
            for partition in partitions
            for reader in (self._reader(partition),)
        }
        reads = list(self._waiting)
        try:
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            while not all(read.done() for read in reads):
                await self.interrupt()
                await asyncio.wait(reads, timeout=_INSIST)
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
        """What the reads brought. Raises their error where they brought nothing, and not only because some are away."""
        found = [stream for reply in replies if not isinstance(reply, BaseException) for stream in reply or []]
        away = [reply for reply in replies if isinstance(reply, Unavailable)]
        errors = [reply for reply in replies if isinstance(reply, Exception) and not isinstance(reply, Unavailable)]
        if away and len(away) == len(replies) and self._absences.keys() >= self._kept:
            raise away[0]  # else it is others' turn
        if errors and not found:
            raise errors[0]  # with something found, the next read meets the same trouble again
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
        await _cancel(self._late.values())
        for reader in self._readers.values():
            await reader.close()
        self._readers.clear()


async def _cancel(futures: Collection[asyncio.Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def read_partitions(gateway: Gateway, worker: str) -> StreamReader:
    """The way to read that the server asks for."""
    return (
        PerNodeReader(gateway, worker)
        if gateway.clustered
        else SingleNodeReader(gateway, gateway.blocking_connection(), worker)
    )
