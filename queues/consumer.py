"""Taking messages: new ones, given-back ones, and those a lost worker left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import Refused
from .gateway import BLOCK, Argument, Gateway, Reader, is_missing_group
from .keys import GROUP, RELEASED, Namespace, Partition
from .leases import Delivery, Leases
from .records import pairs
from .scripts import queue_script

__all__ = ["RELEASED_IDLE_MS", "Consumer", "Taken"]

_LEAVE = queue_script("leave")
_FORGET = queue_script("forget")

RELEASED_IDLE_MS = 30 * 24 * 3600 * 1000
"""Idle time that a given-back message shows, so that every claim takes it whatever the lease."""


@dataclass(slots=True)
class Taken:
    """What one read brought: deliveries, and the hints that came with them."""

    deliveries: list[Delivery] = field(default_factory=list)
    claimable: bool = False
    due: bool = False


class Consumer:
    """One worker's hands on the streams of its queues."""

    def __init__(
        self,
        gateway: Gateway,
        reader: Reader,
        partitions: Sequence[Partition],
        worker: str,
        lease: float,
        leases: Leases[Any],
    ) -> None:
        self._gateway = gateway
        self._reader = reader
        self._worker = worker
        self._lease_ms = round(lease * 1000)
        self._leases = leases
        self.partitions = list(partitions)

    async def create_groups(self, namespace: Namespace) -> None:
        """Make streams and groups where they are missing; a group starts at id 0, so nothing sent before is missed."""
        for partition in self.partitions:
            await self._gateway.command("HSETNX", namespace.queues, partition.queue, 1)
            for stream in (partition.ready, partition.nudge):
                try:
                    await self._gateway.command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
                except Refused as error:
                    if "BUSYGROUP" not in str(error):
                        raise

    async def read(self, free: int, *, block: float | None) -> Taken:
        """Read up to `free` new messages; wait up to `block` seconds for one, at most BLOCK.

        COUNT holds per stream, so several queues are looked at in turn while they have messages, and while they
        have none are waited on together, each with its share of the free slots.
        """
        taken = Taken()
        if len(self.partitions) > 1:
            for partition in self._in_turn():
                room = free - len(taken.deliveries)
                if room > 0:
                    self._sort(await self._read([partition], room, None), taken)
        if not taken.deliveries and not taken.claimable and not taken.due:
            share = max(1, free // len(self.partitions))
            self._sort(await self._read(self.partitions, share, None if block is None else min(block, BLOCK)), taken)
        return taken

    def _in_turn(self) -> list[Partition]:
        """The partitions, each time beginning with another one, so that none starves."""
        self.partitions.append(self.partitions.pop(0))
        return list(self.partitions)

    async def _read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Any]:
        waiting: tuple[str | int, ...] = () if block is None else ("BLOCK", max(1, round(block * 1000)))
        streams = [stream for partition in partitions for stream in (partition.nudge, partition.ready)]
        command = ("XREADGROUP", "GROUP", GROUP, self._worker, "COUNT", count, *waiting, "STREAMS")
        try:
            reply = await self._channel(block)(*command, *streams, *(">" for _ in streams))
        except Refused as error:
            if not is_missing_group(error):
                raise
            await self.create_groups(Namespace(partitions[0].namespace))
            return []
        nudges = [
            ("XACK", stream, GROUP, *(entry for entry, _ in entries))
            for stream, entries in reply or []
            if stream.endswith(b":nudge")
        ]
        if nudges:
            await self._gateway.pipeline(nudges)
        return reply or []

    def _channel(self, block: float | None) -> Callable[..., Awaitable[Any]]:
        """A read that waits has a connection of its own; one that does not goes out with everything else."""
        return self._reader.read if block is not None else self._read_at_once

    async def _read_at_once(self, *command: Argument) -> Any:
        return await self._gateway.command(*command, repeatable=False)

    def _sort(self, reply: list[Any], taken: Taken) -> None:
        by_stream = {partition.ready.encode(): partition for partition in self.partitions}
        for stream, entries in reply:
            partition = by_stream.get(stream)
            for entry, fields in entries:
                if partition is not None:
                    taken.deliveries.append(Delivery(partition, entry, self._worker, 1, pairs(fields or [])))
                elif (fields or [])[1:2] == [b"due"]:
                    taken.due = True
                else:
                    taken.claimable = True

    async def claim(self, partition: Partition, cursor: str, most: int) -> tuple[str, list[Delivery]]:
        """Take over up to `most` messages whose lease has passed or that were given back, from `cursor` on.

        Returns the next cursor ('0-0' at the end of the pending list) and the deliveries. Of entries that somebody
        deleted from the stream by hand, nothing is left to run: they are acknowledged.
        """
        reply = await self._gateway.command(
            "XAUTOCLAIM",
            partition.ready,
            GROUP,
            self._worker,
            self._lease_ms,
            cursor,
            "COUNT",
            most,
            repeatable=False,
        )
        found = [item for item in reply[1] if item is not None]
        if len(found) < len(reply[1]):
            await self._drop_deleted(partition)
        return reply[0].decode(), await self._with_counts(partition, found)

    async def adopt(self, partition: Partition) -> list[Delivery]:
        """Messages that are this worker's in Redis but not in its table: the reply that brought them was lost."""
        return await self._with_counts(partition, [found[0] for _, found in await self._unheld(partition) if found])

    async def _drop_deleted(self, partition: Partition) -> None:
        """Redis 6.2 hands over deleted entries too, without their ids; from 7.0 on it drops them by itself."""
        gone = [entry for entry, found in await self._unheld(partition) if not found]
        await self._gateway.pipeline([("XACK", partition.ready, GROUP, entry) for entry in gone])

    async def _unheld(self, partition: Partition) -> list[tuple[bytes, list[Any]]]:
        """What is this worker's in Redis but not in its table: entry ids, each with its message or an empty list."""
        pending = await self._gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1000, self._worker)
        missing = [entry for entry, _, _, _ in pending if not self._leases.holds(partition, entry)]
        ranges = await self._gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry in missing])
        return list(zip(missing, ranges, strict=True))

    async def _with_counts(self, partition: Partition, found: Sequence[tuple[bytes, list[bytes]]]) -> list[Delivery]:
        """XAUTOCLAIM does not tell the delivery count, which is part of the fence."""
        counts = await self._gateway.pipeline(
            [("XPENDING", partition.ready, GROUP, entry, entry, 1) for entry, _ in found]
        )
        return [
            Delivery(partition, entry, self._worker, pending[0][3], pairs(fields), claimed=True)
            for (entry, fields), pending in zip(found, counts, strict=True)
            if pending and pending[0][1].decode() == self._worker
        ]

    async def nudge(self, partition: Partition) -> None:
        """Wake another worker: there is more to claim than this one has room for."""
        await self._gateway.command("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "released")

    async def forget(self, partition: Partition, gone_for: float, present: Collection[str]) -> int:
        """Remove names of workers that have been silent for `gone_for` seconds and hold nothing. Returns how many."""
        try:
            consumers = await self._gateway.command("XINFO", "CONSUMERS", partition.ready, GROUP)
        except Refused as error:
            if is_missing_group(error) or "no such key" in str(error):
                return 0
            raise
        removed = 0
        for flat in consumers:
            consumer = dict(zip(flat[::2], flat[1::2], strict=True))
            name = consumer[b"name"].decode()
            if name not in present and name != RELEASED and consumer[b"idle"] > gone_for * 1000:
                removed += await self._gateway.run(_FORGET, [partition.ready, partition.nudge], [GROUP, name])
        return removed

    async def interrupt(self) -> None:
        """End a blocking read that waits."""
        await self._reader.interrupt()

    async def leave(self) -> None:
        """Give back what is still this worker's, and take its name off the groups."""
        for partition in self.partitions:
            await self._gateway.run(
                _LEAVE,
                [partition.ready, partition.nudge, partition.watch],
                [GROUP, self._worker, RELEASED, RELEASED_IDLE_MS],
            )
