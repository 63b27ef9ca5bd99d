"""Taking messages: new ones, given-back ones, and those a lost worker left."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from ..errors import Refused, ServerFull, Unavailable
from ..keys import GROUP, RELEASED, Partition, is_nobody
from ..transport import BLOCK, Argument, Command, Gateway, is_missing_group, pairs, queue_script
from .fleet_locks import acquire_fleet_locks
from .leases import Delivery, Leases
from .quarantine_store import QuarantinedDelivery, take_quarantined
from .stream_reader import Stream, StreamReader

__all__ = ["RELEASED_IDLE_MS", "Consumer", "ReadResult"]

_LEAVE = queue_script("leave_group")
_FORGET = queue_script("remove_consumer")

_TURN: Final = 0.025
"""Seconds between looks at more partitions than there are slots. A read that waits on all of them could bring more than
there is room for; and one that waits so shortly on some of them is answered by the server's timer, each 100 ms.
"""

_FEW: Final = 8
"""Looks between such waits, each at as many partitions as there are slots."""

RELEASED_IDLE_MS = 30 * 24 * 3600 * 1000
"""Idle time that a given-back message shows, so that every claim takes it whatever the lease."""


@dataclass(slots=True)
class ReadResult:
    """What one read brought: deliveries, and the hints that came with them."""

    deliveries: list[Delivery] = field(default_factory=list)
    claimable: bool = False
    due: bool = False
    route_changed: bool = False
    quarantined: bool = False

    def __bool__(self) -> bool:
        return bool(self.deliveries) or self.claimable or self.due or self.route_changed or self.quarantined

    def add_nudge(self, why: Sequence[bytes]) -> None:
        """A nudge: what it is about."""
        if list(why) == [b"due"]:
            self.due = True
        elif list(why) == [b"route"]:
            self.route_changed = True
        elif list(why) == [b"suspect"]:
            self.quarantined = True
        else:
            self.claimable = True


class Consumer:
    """One worker's hands on the streams of its partitions. Which ones they are may change at any time: `assign`."""

    def __init__(
        self,
        gateway: Gateway,
        reading: StreamReader,
        partitions: Sequence[Partition],
        worker: str,
        lease: float,
        leases: Leases[Any],
    ) -> None:
        """partitions: those it reads and serves, until `assign` says otherwise. lease: seconds."""
        self._gateway = gateway
        self._reading = reading
        self._worker = worker
        self._lease_ms = round(lease * 1000)
        self._leases = leases
        self._joined: dict[Partition, None] = {}
        self._taken_from = list(partitions)
        self._woken = asyncio.Event()
        self._found = True
        self.partitions: Sequence[Partition] = list(partitions)

    async def assign(self, taken_from: Sequence[Partition], served: Sequence[Partition]) -> None:
        """From now on take new messages of some partitions, and claim in all that are served; groups are made where
        there are none. A read that waits is ended where new messages are now to come from elsewhere.
        """
        await self.create_groups([partition for partition in served if partition not in self._joined])
        self.partitions = list(served)
        self._reading.keep(taken_from)
        if set(taken_from) != set(self._taken_from):
            self._taken_from = list(taken_from)
            await self.interrupt()

    async def create_groups(self, partitions: Sequence[Partition] | None = None) -> None:
        """Make streams and groups where they are missing, in all partitions that are served where none are named; a
        group starts at id 0, so nothing sent before is missed.
        """
        wanted = self.partitions if partitions is None else partitions
        await asyncio.gather(*(self._create_group(stream) for one in wanted for stream in (one.ready, one.nudge)))
        self._joined |= dict.fromkeys(wanted)

    async def _create_group(self, stream: str) -> None:
        try:
            await self._gateway.command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
        except Refused as error:
            if "BUSYGROUP" not in str(error):
                raise
        except ServerFull:  # said before it is looked whether there is one already
            if not await self._has_group(stream):
                raise

    async def _has_group(self, stream: str) -> bool:
        try:
            groups = await self._gateway.command("XINFO", "GROUPS", stream)
        except Refused:
            return False
        return any(pairs(group)[b"name"] == GROUP.encode() for group in groups)

    async def read(self, free: int, *, block: float | None) -> ReadResult:
        """Read up to `free` new messages; wait up to `block` seconds for one, at most BLOCK.

        One look at many partitions, each with its share of the free slots; then the room that is left goes to those
        whose share was too small. Where there are more partitions than slots, they are looked at in turn.
        """
        taken = ReadResult()
        if not self._taken_from:
            await self._be_idle(block)
            return taken
        turns = -(-len(self._taken_from) // free)
        if turns > 1 or block is None:
            # All of them while there is work; when the last look was in vain, a few, so that who waits costs little.
            for _ in range(turns if block is None or self._found else min(turns, _FEW)):
                if not taken.deliveries:  # a nudge does not tell that there are no messages
                    await self._look(self._next_window(free), free, None, taken)
        if block is not None and not taken and turns == 1:
            await self._look(self._next_window(free), free, min(block, BLOCK), taken)
        elif block is not None and not taken:
            await self._be_idle(min(block, _TURN))
        self._found = bool(taken.deliveries)
        return taken

    async def _be_idle(self, block: float | None) -> None:
        """Wait here, not on the server: until the time is up, or `interrupt` is called."""
        self._woken.clear()
        with anyio.move_on_after(block or 0):
            await self._woken.wait()

    def _next_window(self, free: int) -> list[Partition]:
        """As many partitions as there are free slots, each time beginning with another one, so that none starves.
        Those that are away stand back until it is time to try them again.
        """
        here = [partition for partition in self._taken_from if not self._reading.rests(partition)] or self._taken_from
        window = here[: min(free, len(here))]
        step = len(window) if len(window) < len(here) else 1
        passed = here[:step]
        self._taken_from = [*(one for one in self._taken_from if one not in passed), *passed]
        return window

    async def _look(self, window: Sequence[Partition], free: int, block: float | None, taken: ReadResult) -> None:
        """One look at several partitions; then more from those that may have more, while there is room."""
        share = free // len(window)
        full = self._sort(window, await self._read(window, share, block), share, taken)
        for partition in full if len(window) > 1 else ():
            room = free - len(taken.deliveries)
            if room > 0:
                self._sort([partition], await self._read([partition], room, None), room, taken)

    async def _read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        try:
            reply = await self._reading.read(partitions, count, block)
        except Refused as error:
            if not is_missing_group(error):
                raise
            await self.create_groups()
            return []
        nudges: list[Command] = [
            ("XACK", stream, GROUP, *(entry for entry, _ in entries))
            for stream, entries in reply
            if stream.endswith(b":nudge")
        ]
        if nudges:
            await self._gateway.pipeline(nudges)
        return reply

    def _sort(
        self, window: Sequence[Partition], reply: Sequence[Stream], share: int, taken: ReadResult
    ) -> list[Partition]:
        """Add what came to what was taken; returns the partitions that gave their whole share, and may have more."""
        by_stream = {partition.ready.encode(): partition for partition in window}
        full: list[Partition] = []
        for stream, entries in reply:
            partition = by_stream.get(stream)
            if partition is not None and len(entries) == share:
                full.append(partition)
            for entry, fields in entries:
                if partition is not None:
                    taken.deliveries.append(Delivery(partition, entry, self._worker, 1, pairs(fields or [])))
                else:
                    taken.add_nudge((fields or [])[1:2])
        return full

    def is_away(self, partition: Partition) -> bool:
        """Whether this one partition cannot be reached now, while others can."""
        return self._reading.is_away(partition)

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        """A partition could not be reached; whether it alone is left out for that, and the others go on."""
        return self._reading.mark_unavailable(partition, error)

    def returned(self) -> list[Partition]:
        """Partitions that were away, and can be reached again since this was asked last."""
        return self._reading.returned()

    async def acquire_claim_lock(self, partition: Partition, ttl: float) -> bool:
        """Acquire the lock for claiming in a partition: one worker of the fleet each `ttl` seconds."""
        waits = await acquire_fleet_locks(self._gateway, {partition: partition.sweep}, self._worker, ttl)
        return not waits[partition]

    async def claim(self, partition: Partition, cursor: str, most: int) -> tuple[str, list[Delivery]]:
        """Take over up to `most` messages whose lease has passed or that were given back, from `cursor` on.

        Returns the next cursor ('0-0' at the end of the pending list) and the deliveries. Of entries that somebody
        deleted from the stream by hand, nothing is left to run: they are acknowledged.
        """
        # Asked first, for XAUTOCLAIM looks at ten entries for each that it may claim: with little room, it would take a
        # thousand round trips through what thousands of healthy workers hold, and here it is one, a tenth as dear.
        look = ("XPENDING", partition.ready, GROUP, "IDLE", self._lease_ms, cursor, "+", 1)
        expired = await self._gateway.command(*look)
        if not expired:
            return "0-0", []
        reply = await self._gateway.command(
            "XAUTOCLAIM",
            partition.ready,
            GROUP,
            self._worker,
            self._lease_ms,
            expired[0][0],
            "COUNT",
            most,
            repeatable=False,
        )
        found = [item for item in reply[1] if item is not None]
        if len(found) < len(reply[1]):
            await self._drop_deleted(partition)
        return reply[0].decode(), await self._with_counts(partition, found)

    async def take_quarantined(self, partition: Partition) -> QuarantinedDelivery:
        """The suspect that has waited longest in a partition. Not at the same time as `read`, `claim` or `adopt`."""
        return await take_quarantined(self._gateway, partition, self._worker)

    async def recover_own(self, partition: Partition) -> list[Delivery]:
        """Messages that are this worker's in Redis but not in its table: the reply that brought them was lost."""
        return await self._with_counts(
            partition, [found[0] for _, found in await self._pending_but_untracked(partition) if found]
        )

    async def _drop_deleted(self, partition: Partition) -> None:
        """Redis 6.2 hands over deleted entries too, without their ids; from 7.0 on it drops them by itself."""
        gone = [entry for entry, found in await self._pending_but_untracked(partition) if not found]
        await self._gateway.pipeline([("XACK", partition.ready, GROUP, entry) for entry in gone])

    async def _pending_but_untracked(self, partition: Partition) -> list[tuple[bytes, list[Any]]]:
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
        """Wake another worker: there is more to claim than this one has room for. A full server goes without."""
        with suppress(ServerFull):
            await self._gateway.command("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "released")

    async def remove_idle_consumers(self, partition: Partition, gone_for: float, present: Collection[str]) -> int:
        """Remove names of workers that have been silent for `gone_for` seconds and hold nothing. Returns how many.

        A worker that never had a message may have a name among those who hear nudges only.
        """
        idle = await self._idle(partition.nudge)
        for name, silent in (await self._idle(partition.ready)).items():
            idle[name] = min(silent, idle.get(name, silent))
        removed = 0
        for name, silent in idle.items():
            if name not in present and not is_nobody(name) and silent > gone_for * 1000:
                removed += await self._gateway.run(_FORGET, [partition.ready, partition.nudge], [GROUP, name])
        return removed

    async def _idle(self, stream: str) -> dict[str, int]:
        """The names in a stream's group, each with the milliseconds for which it has been silent."""
        try:
            consumers = await self._gateway.command("XINFO", "CONSUMERS", stream, GROUP)
        except Refused as error:
            if is_missing_group(error) or "no such key" in str(error):
                return {}
            raise
        found = [pairs(flat) for flat in consumers]
        return {consumer[b"name"].decode(): int(consumer[b"idle"]) for consumer in found}

    async def interrupt(self) -> None:
        """End a blocking read that waits."""
        self._woken.set()
        await self._reading.interrupt()

    async def leave(self) -> None:
        """Give back what is still this worker's, and take its name off the groups."""
        args: list[Argument] = [GROUP, self._worker, RELEASED, RELEASED_IDLE_MS]
        await asyncio.gather(
            *(self._gateway.run(_LEAVE, [one.ready, one.nudge, one.watch], args) for one in self._joined)
        )
