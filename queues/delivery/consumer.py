"""The consumer: reads new messages, claims released ones and those of lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio

from ..errors import LeaseLost, Refused, ServerFull, Unavailable, WrongType
from ..junk import split
from ..keys import GROUP, RELEASED, Partition, is_reserved
from ..lanes import IDLE, LANES, Lane, lane_rank
from ..partitions.resharding import wanted_lane
from ..runtime import RUNTIME
from ..transport.clients import is_missing_group
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument, Command
from ..transport.scripts import pairs, queue_script
from .fleet_locks import acquire_fleet_locks
from .leases import RELEASED_IDLE_MS, Delivery, Leases, OnTouch, Touch, ignore_touch, touch_partition
from .quarantine_store import QuarantinedDelivery, take_quarantined
from .settlement import raise_count, release
from .stream_reader import Stream, StreamReader

if TYPE_CHECKING:
    from .lane_turns import LaneTurns

_CLAIM = queue_script("claim")
_CREATE = queue_script("create_groups")
_LEAVE = queue_script("leave_group")
_REMOVE = queue_script("remove_consumer")

_POLL_INTERVAL: Final = 0.025
"""Seconds between reads of more partitions than there are free slots. One blocking read on all of them could return
more messages than there are slots; one that blocks so shortly is answered by the server's timer, each 100 ms.
"""

_POLL_READS: Final = 8
"""Reads between such pauses while the queues are empty, each of as many partitions as there are free slots."""

_IDLE_RANK: Final = LANES.index(IDLE)

_SPARE_LOOK: Final = 0.25
"""Seconds after which a blocking read ends that leaves out idle tasks: slots may have become free meanwhile."""


@dataclass(slots=True)
class ReadResult:
    """The deliveries of one read, and the nudges that came with them."""

    deliveries: list[Delivery] = field(default_factory=list)
    claimable: bool = False
    due: bool = False
    route_changed: bool = False
    quarantined: bool = False
    lanes: set[tuple[str, Lane]] = field(default_factory=set)
    """Queues and the lanes that producers ask for."""

    def __bool__(self) -> bool:
        nudged = self.claimable or self.due or self.route_changed or self.quarantined or bool(self.lanes)
        return bool(self.deliveries) or nudged

    def add_nudge(self, why: bytes, queue: str) -> None:
        """Add a nudge by its cause."""
        lane = wanted_lane(why)
        if lane is not None:
            self.lanes.add((queue, lane))
        elif why == b"due":
            self.due = True
        elif why == b"route":
            self.route_changed = True
        elif why == b"suspect":
            self.quarantined = True
        else:
            self.claimable = True


async def remove_consumer(gateway: Gateway, partition: Partition, name: str) -> bool:
    """Remove the consumer of a worker from the groups of a partition. Return False if a message is pending on it."""
    return bool(await gateway.run(_REMOVE, [partition.ready, partition.nudge], [GROUP, name]))


class Consumer:
    """One worker's consumer in the groups of its partitions. The partitions may change at any time: `assign`."""

    def __init__(
        self,
        gateway: Gateway,
        reader: StreamReader,
        partitions: Sequence[Partition],
        worker: str,
        lease: float,
        leases: Leases[Any],
        on_touch: OnTouch = ignore_touch,
    ) -> None:
        """Create the consumer; `create_groups` or `assign` adds it to the groups.

        Args:
            partitions: Those that it reads and serves until `assign` changes them.
            lease: Seconds.
            on_touch: Called with each touch of a partition (see touch.py).
        """
        self._gateway = gateway
        self._reader = reader
        self._worker = worker
        self._lease_ms = round(lease * 1000)
        self._leases = leases
        self._on_touch = on_touch
        self._joined: dict[Partition, None] = {}
        self._read_from: dict[int, list[Partition]] = {}
        self._empty: dict[int, int] = {}
        self._set_read_from(partitions)
        self.paused: Collection[str] = ()
        """Queues that an operator has paused: no message is read from them, and none is claimed."""
        self._turns: LaneTurns | None = None
        self.spare = False
        """Whether the last read found no task in any lane but that of idle tasks."""
        self._interrupted = asyncio.Event()
        self._had_messages = True
        self.partitions: Sequence[Partition] = list(partitions)

    @property
    def lease(self) -> float:
        """Seconds after which deliveries that were not renewed are claimed."""
        return self._lease_ms / 1000

    def set_lease(self, lease: float) -> None:
        """Claim deliveries that were not renewed for this time, in seconds, from now on."""
        self._lease_ms = round(lease * 1000)

    async def assign(self, read_from: Sequence[Partition], served: Sequence[Partition]) -> None:
        """Read new messages from some partitions from now on, and claim in all that are served. Creates groups.

        If other partitions are read from now on, a blocking read is interrupted.
        """
        await self.create_groups([partition for partition in served if partition not in self._joined])
        self.partitions = list(served)
        self._reader.keep(read_from)
        if set(read_from) != {partition for lane in self._read_from.values() for partition in lane}:
            self._set_read_from(read_from)
            await self.interrupt()

    async def pause(self, queues: Collection[str]) -> None:
        """Read no messages of these queues from now on, but of all others; a blocking read is interrupted.

        Nudges are read still. Messages of a reply that is on its way are for the caller to release: see `is_paused`.
        """
        self.paused = self._reader.paused = frozenset(queues)
        await self.interrupt()

    def is_paused(self, partition: Partition) -> bool:
        """Return whether the queue of a partition is paused."""
        return partition.queue in self.paused

    def _set_read_from(self, partitions: Sequence[Partition]) -> None:
        """Read from these partitions, lane by lane."""
        lanes: dict[int, list[Partition]] = {}
        for partition in partitions:
            lanes.setdefault(lane_rank(partition.index), []).append(partition)
        self._read_from, self._empty = dict(sorted(lanes.items())), {}

    async def create_groups(self, partitions: Sequence[Partition] | None = None) -> None:
        """Create missing streams and groups, by default in all served partitions.

        A group starts at id 0, so that no earlier message is missed.
        """
        wanted = self.partitions if partitions is None else partitions
        await asyncio.gather(*(self._gateway.run(_CREATE, [one.ready, one.nudge], [GROUP]) for one in wanted))
        self._joined |= dict.fromkeys(wanted)

    async def read(self, free: int, *, block: float | None, spare: int | None = None) -> ReadResult:
        """Read up to `free` new messages; wait up to `block` seconds for one, at most `GatewayTimings.block`.

        One read covers many partitions, each with its share of the free slots. Then the remaining slots go to
        partitions that may have more. If there are more partitions than slots, they are read in turn.

        Args:
            spare: Idle tasks that may start now, None for as many as there are free slots.
        """
        result = ReadResult()
        lanes = self._read_from
        if not lanes:
            await self._pause(block)
        elif len(lanes) > 1 or _IDLE_RANK in lanes:
            await self._read_lanes(free, block, free if spare is None else min(free, spare), result)
        else:
            self.spare = False
            (rank,) = lanes
            await self._read_lane(rank, free, block, result)
        self._had_messages = bool(result.deliveries)
        return result

    async def _read_lane(self, rank: int, free: int, block: float | None, result: ReadResult) -> None:
        """Read from the only lane."""
        windows = -(-len(self._read_from.get(rank, ())) // free)
        if windows > 1 or block is None:
            # All of them while there is work. After an empty read only a few, so that an idle worker costs little.
            for _ in range(windows if block is None or self._had_messages else min(windows, _POLL_READS)):
                if not result.deliveries:  # there may be messages after a nudge
                    await self._read_window(self._next_window(rank, free), free, None, result)
        if block is not None and not result and windows == 1:
            block = min(block, self._gateway.timings.block)
            await self._read_window(self._next_window(rank, free), free, block, result)
        elif block is not None and not result:
            await self._pause(min(block, _POLL_INTERVAL))

    async def _read_lanes(self, free: int, block: float | None, spare: int, result: ReadResult) -> None:
        """Read lane by lane what waits. If nothing does, block on all lanes: then their tasks arrive together.

        Idle tasks are read if no other lane has any, so that they start on spare slots only.
        """
        others = {rank for rank in self._read_from if rank != _IDLE_RANK}
        waiting, thorough = set(others), block is None or self._had_messages
        turns = self._lane_turns()
        while waiting and (room := free - len(result.deliveries)) > 0:
            rank, most = turns.next(waiting)
            if not await self._read_all(rank, min(room, most), result, thorough=thorough):
                waiting.discard(rank)
        self.spare = not waiting and all(self._is_empty(rank) for rank in others)
        room = min(free, spare) - len(result.deliveries)
        if self.spare and _IDLE_RANK in self._read_from and room > 0:
            await self._read_all(_IDLE_RANK, room, result, thorough=thorough)
        if block is None or result:
            return
        window = [partition for rank in self._read_from if rank != _IDLE_RANK for partition in self._read_from[rank]]
        block, share = min(block, self._gateway.timings.block), free // max(1, len(window))
        if _IDLE_RANK in self._read_from:
            idle = self._next_window(_IDLE_RANK, spare) if self.spare and spare > 0 else []
            window += idle
            share = min(free // max(1, len(window)), spare // len(idle) if idle else free)
            block = block if len(idle) == len(self._read_from[_IDLE_RANK]) else min(block, _SPARE_LOOK)
        if not window or share < 1:
            await self._pause(min(block, _POLL_INTERVAL if window else _SPARE_LOOK))
        else:
            await self._read_window(window, share * len(window), block, result)

    async def _read_all(self, rank: int, most: int, result: ReadResult, *, thorough: bool) -> bool:
        """Read up to `most` messages of a lane without blocking. Return whether it may have more.

        thorough: whether to read all of its partitions, and not only a few, so that an idle worker costs little.
        """
        end = len(result.deliveries) + most
        left = len(self._read_from.get(rank, ()))
        reads = left if thorough else _POLL_READS
        while left > 0 and reads > 0 and (room := end - len(result.deliveries)) > 0:
            window = self._next_window(rank, room)
            await self._read_window(window, room, None, result)
            reads, left = reads - 1, left - max(1, len(window))
            full = len(result.deliveries) >= end
            self._empty[rank] = 0 if full else self._empty.get(rank, 0) + len(window)
        if len(result.deliveries) < end and self._is_empty(rank):
            self._lane_turns().found_empty(rank)
        return len(result.deliveries) >= end

    def _is_empty(self, rank: int) -> bool:
        """Return whether each partition of a lane was read to its end, the last time that it was read."""
        return self._empty.get(rank, 0) >= len(self._read_from.get(rank, ()))

    def _lane_turns(self) -> LaneTurns:
        if self._turns is None:
            from .lane_turns import LaneTurns

            self._turns = LaneTurns()
        return self._turns

    async def _pause(self, block: float | None) -> None:
        """Wait in this process, not on the server, until the time is up or `interrupt` is called."""
        self._interrupted.clear()
        with anyio.move_on_after(block or 0):
            await self._interrupted.wait()

    def _next_window(self, rank: int, free: int) -> list[Partition]:
        """Return as many partitions of a lane as there are free slots, in rotation, so that none starves.

        Unavailable partitions are left out until it is time to try them again.
        """
        read_from = self._read_from.get(rank)
        if not read_from:  # the assignment has changed meanwhile
            return []
        available = [one for one in read_from if not self._reader.rests(one)] or read_from
        window = available[: min(free, len(available))]
        step = len(window) if len(window) < len(available) else 1
        passed = available[:step]
        self._read_from[rank] = [*(one for one in read_from if one not in passed), *passed]
        return window

    async def _read_window(
        self, window: Sequence[Partition], free: int, block: float | None, result: ReadResult
    ) -> None:
        """Read several partitions at once; then read more from those that may have more, while slots are free."""
        if not window:
            return
        end = len(result.deliveries) + free
        share = free // len(window)
        full = self._add(window, await self._read(window, share, block), share, result)
        for partition in full if len(window) > 1 else ():
            room = end - len(result.deliveries)
            if room > 0 and (block is None or lane_rank(partition.index) != _IDLE_RANK):
                self._add([partition], await self._read([partition], room, None), room, result)

    async def _read(self, partitions: Sequence[Partition], count: int, block: float | None) -> list[Stream]:
        try:
            reply = await self._reader.read(partitions, count, block)
        except WrongType:
            if not await self._gateway.set_keys_aside(key for one in partitions for key in (one.ready, one.nudge)):
                raise
            await self.create_groups()
            return []
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

    def _add(
        self, window: Sequence[Partition], reply: Sequence[Stream], share: int, result: ReadResult
    ) -> list[Partition]:
        """Add a reply to the result. Return the partitions that gave their whole share, and may have more."""
        by_stream = {partition.ready.encode(): partition for partition in window}
        queues: dict[bytes, str] = {}
        full: list[Partition] = []
        for stream, entries in reply:
            partition = by_stream.get(stream)
            if partition is not None and len(entries) == share:
                full.append(partition)
            for entry, fields in entries:
                if partition is not None:
                    repeated, requested = self._leases.note_read(partition, entry), self._reader.requested
                    result.deliveries.append(
                        Delivery(partition, entry, self._worker, 1, pairs(fields or []), False, repeated, requested)
                    )
                else:
                    queues = queues or {known.nudge.encode(): known.queue for known in window}
                    result.add_nudge(pairs(fields or []).get(b"why", b""), queues.get(stream, ""))
            if partition is not None and entries:
                self._count_starts(partition, len(entries))
        return full

    def _count_starts(self, partition: Partition, count: int) -> None:
        """Count starts for the turns of the lanes, if there are several."""
        if len(self._read_from) > 1:
            self._lane_turns().started(lane_rank(partition.index), count, self._read_from)

    def is_away(self, partition: Partition) -> bool:
        """Return whether this partition is unavailable while others are available."""
        return self._reader.is_away(partition)

    def mark_unavailable(self, partition: Partition, error: Unavailable) -> bool:
        """Mark a partition as unavailable. Return whether the others are read without it."""
        return self._reader.mark_unavailable(partition, error)

    def returned(self) -> list[Partition]:
        """Return the partitions that became available again since the last call."""
        return self._reader.returned()

    async def acquire_claim_lock(self, partition: Partition, ttl: float) -> bool:
        """Acquire the lock for claiming in a partition: one worker of the fleet each `ttl` seconds."""
        waits = await acquire_fleet_locks(self._gateway, {partition: partition.sweep_lock}, self._worker, ttl)
        return not waits[partition]

    async def claim(self, partition: Partition, cursor: str, most: int) -> tuple[str, list[Delivery]]:
        """Claim up to `most` messages whose lease has expired, or that were released, from `cursor` on.

        Own messages are claimed only if they are not in this worker's table: the run failed, or the reply with them was
        lost. Entries that were deleted from the stream by hand are acknowledged.

        Returns:
            The next cursor ('0-0' at the end of the pending list), and the deliveries.
        """
        reached, claimed, own = await self._claim(partition, cursor, most)
        unknown = [entry for entry in own if not self._leases.holds(partition, entry)]
        if unknown and len(claimed) < most:
            reached, more, _ = await self._claim(partition, cursor, most - len(claimed), unknown)
            claimed += more
        elif unknown:  # the next claim starts again, without those that were claimed now
            reached = "-" if cursor == "0-0" else cursor
        return reached, claimed

    async def _claim(
        self, partition: Partition, cursor: str, most: int, unknown: Sequence[bytes] = ()
    ) -> tuple[str, list[Delivery], list[bytes]]:
        """Return the next cursor, the claimed deliveries, and own entries whose lease has expired."""
        start = "-" if cursor == "0-0" else cursor
        args: list[Argument] = [GROUP, self._worker, self._lease_ms, RELEASED, start, most, *unknown]
        sent = RUNTIME.monotonic()
        touched, reached, found, own = await self._gateway.run_once(_CLAIM, [partition.ready, partition.seen], args)
        self._on_touch(partition, Touch.of(touched, sent))
        claimed = [
            Delivery(partition, entry, self._worker, count, pairs(fields), claimed=True, requested=sent)
            for entry, count, fields in found
        ]
        self._count_starts(partition, len(claimed))
        return reached.decode() or "0-0", claimed, own

    async def touch(self, partition: Partition) -> None:
        """Touch a partition, so that its leases do not count as unattended."""
        self._on_touch(partition, await touch_partition(self._gateway, partition, self._lease_ms))

    async def take_quarantined(self, partition: Partition) -> QuarantinedDelivery:
        """Take the message that has been in quarantine longest. Not to be called during `read` or `claim`."""
        return await take_quarantined(self._gateway, partition, self._worker)

    async def recover_own(self, partition: Partition) -> list[Delivery]:
        """Return messages that are pending on this worker but not in its table: the reply with them was lost.

        Or the worker ran them and failed, so each gets a new fence. It refuses the reply, should it still arrive.
        """
        pending = await self._gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1000, self._worker)
        missing = [entry for entry, *_ in pending if not self._leases.holds(partition, entry)]
        commands: list[Command] = []
        for entry in missing:  # owner and count are read again: another worker may have claimed the message since
            commands += (
                ("XRANGE", partition.ready, entry, entry),
                ("XPENDING", partition.ready, GROUP, entry, entry, 1),
            )
        replies = await self._gateway.pipeline(commands)
        recovered = []
        for entry, message, owner in zip(missing, replies[::2], replies[1::2], strict=True):
            if message and owner and owner[0][1] == self._worker.encode():
                self._leases.note_read(partition, entry)
                delivery = Delivery(partition, entry, self._worker, owner[0][3], pairs(message[0][1]), claimed=True)
                with suppress(LeaseLost):
                    recovered.append((await raise_count(self._gateway, delivery)).delivery)
        return recovered

    async def nudge(self, partition: Partition) -> None:
        """Nudge another worker: there is more to claim than this one has slots for. Not on a full server."""
        with suppress(ServerFull):
            await self._gateway.command("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "released")

    async def remove_idle_consumers(self, partition: Partition, gone_for: float, present: Collection[str]) -> int:
        """Remove the consumers of workers that are not present, idle for `gone_for` seconds, without messages.

        A worker that never had a message may be a consumer of the nudge stream only.

        Returns:
            The number of removed consumers.
        """
        idle_ms = await self._idle_ms(partition.nudge)
        for name, idle in (await self._idle_ms(partition.ready)).items():
            idle_ms[name] = min(idle, idle_ms.get(name, idle))
        removed = 0
        for name, idle in idle_ms.items():
            if name not in present and not is_reserved(name) and idle > gone_for * 1000:
                removed += await remove_consumer(self._gateway, partition, name)
        return removed

    async def _idle_ms(self, stream: str) -> dict[str, int]:
        """Return the consumers of a stream's group, each with its idle time in milliseconds."""
        try:
            consumers = await self._gateway.command("XINFO", "CONSUMERS", stream, GROUP)
        except Refused as error:
            if is_missing_group(error) or "no such key" in str(error):
                return {}
            raise
        idle = {found[b"name"]: int(found[b"idle"]) for found in map(pairs, consumers)}
        return {name: idle[name.encode()] for name in split(idle).good}  # no worker has another name

    async def interrupt(self) -> None:
        """End a blocking read."""
        self._interrupted.set()
        await self._reader.interrupt()

    async def leave(self) -> None:
        """Release the messages of this worker, and remove it from the groups."""
        await asyncio.gather(*(self._leave(partition) for partition in self._joined))

    async def _leave(self, partition: Partition) -> None:
        pending = await self._gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1000, self._worker)
        messages = await self._gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry, *_ in pending])
        for (entry, _, _, count), found in zip(pending, messages, strict=True):
            if found:
                with suppress(LeaseLost):
                    delivery = Delivery(partition, entry, self._worker, count, pairs(found[0][1]))
                    await release(self._gateway, delivery, None, data=None)
        args: list[Argument] = [GROUP, self._worker, RELEASED, RELEASED_IDLE_MS]
        await self._gateway.run(_LEAVE, [partition.ready, partition.nudge, partition.promote_lock], args)
