"""The blocking read of several partitions at once, never for more messages than there is room for.

COUNT holds for each stream of an XREADGROUP, so the room is dealt out before it is known who has messages: each
partition gets a share, and the shares never sum to more. On one server, one connection waits for all partitions. In a
cluster a command stays in one slot, so each partition has a connection; when the first has brought something, the
others are told to come back, with what they may have by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from .gateway import Argument, Gateway, Reader
from .keys import GROUP, Partition

__all__ = ["OneConnection", "PerPartition", "Reading", "Stream", "read_partitions"]

Stream = tuple[bytes, list[tuple[bytes, list[bytes] | None]]]
"""A stream's key, and the entries that came from it."""

_INSIST: Final = 0.02
"""Seconds after which a read that was told to come back is told again: it may not have been waiting yet."""


class Reading(Protocol):
    """Reads from ready and nudge streams of partitions, as one worker."""

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        """Up to `count` entries from each stream; waits up to `block` seconds for the first, None for not at all."""

    async def interrupt(self) -> None:
        """End a read that waits."""

    def keep(self, partitions: Sequence[Partition]) -> None:
        """From now on no others are read."""

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


class OneConnection:
    """One server: one command. One that waits has a connection of its own; one that does not goes out with all else."""

    def __init__(self, gateway: Gateway, reader: Reader, worker: str) -> None:
        self._gateway = gateway
        self._reader = reader
        self._worker = worker

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        command = _command(self._worker, partitions, count, block)
        if block is None:
            return await self._gateway.command(*command, repeatable=False) or []
        return await self._reader.read(*command) or []

    async def interrupt(self) -> None:
        await self._reader.interrupt()

    def keep(self, partitions: Sequence[Partition]) -> None:
        """There is one connection for all."""

    async def close(self) -> None:
        await self._reader.close()


class PerPartition:
    """A cluster: a connection for each partition, to the node that has it."""

    def __init__(self, gateway: Gateway, worker: str) -> None:
        self._gateway = gateway
        self._worker = worker
        self._readers: dict[Partition, Reader] = {}
        self._kept: set[Partition] = set()
        self._waiting: dict[asyncio.Task[Any], Reader] = {}

    async def read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        await self._close_others()
        found = await self._gather(partitions, count, None)
        if found or block is None:
            return found
        return await self._gather(partitions, count, block)

    async def _gather(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        """Read all at once. However this ends, no read is left behind that could take a message unheard."""
        self._waiting = {
            asyncio.ensure_future(reader.read(*_command(self._worker, [partition], count, block))): reader
            for partition in partitions
            for reader in (self._reader(partition),)
        }
        reads = list(self._waiting)
        try:
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            while not all(read.done() for read in reads):
                if block is not None:
                    await self.interrupt()
                await asyncio.wait(reads, timeout=_INSIST)
        finally:
            for read in reads:
                read.cancel()
            replies = await asyncio.gather(*reads, return_exceptions=True)
            self._waiting = {}
        found = [stream for reply in replies if not isinstance(reply, BaseException) for stream in reply or []]
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and not found:
            raise errors[0]  # with something found, the next read meets the same trouble again
        return found

    def _reader(self, partition: Partition) -> Reader:
        found = self._readers.get(partition)
        if found is None:
            found = self._readers[partition] = self._gateway.reader(partition.ready)
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
        for reader in self._readers.values():
            await reader.close()
        self._readers.clear()


def read_partitions(gateway: Gateway, worker: str) -> Reading:
    """The way to read that the server asks for."""
    return PerPartition(gateway, worker) if gateway.clustered else OneConnection(gateway, gateway.reader(), worker)
