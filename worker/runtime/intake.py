"""Taking work: what was left behind first, then what is new; never more than there are free slots."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from ...queues import Backoff, Consumer, Delivery, Partition, QueueError, Unavailable
from ..log import logger
from .quarantine_gate import QuarantineGate
from .reclaim import START, ReclaimSchedule
from .slots import Slots

__all__ = ["Intake"]


_RETRY = Backoff(first=0.1, longest=5.0)
"""Delays before messages are asked for again after an error."""

_LOOK_AGAIN = 0.05
"""Seconds after which a burst looks again whether a suspect has ended."""

_FEW = 8
"""Slots that are read for at once, be it all of them."""


class Intake:
    """The one loop that takes messages and gives each a slot."""

    def __init__(
        self,
        consumer: Consumer,
        slots: Slots,
        reclaim: ReclaimSchedule,
        gate: QuarantineGate,
        *,
        start: Callable[[Delivery], None],
        on_due: Callable[[], None],
        on_route_changed: Callable[[], None],
        give_back: Callable[[Delivery], Awaitable[None]],
    ) -> None:
        """start: begins an execution, which gives its slot back. on_due: due times have changed. on_rerouted: a
        partition was closed. give_back: returns a delivery that came beyond the free slots.
        """
        self._consumer = consumer
        self._slots = slots
        self._reclaim = reclaim
        self._gate = gate
        self._start = start
        self._on_due = on_due
        self._on_route_changed = on_route_changed
        self._give_back = give_back
        self._stopping = False
        self._plenty = False
        self._dispatched = 0
        self.reading = False
        self.last_read = time.monotonic()
        """When it last asked for messages, or was about to (monotonic clock)."""
        self.error = ""
        """What keeps it from taking messages."""

    async def run(self) -> None:
        """Take work until `stop`. Redis may leave and come back meanwhile."""
        delays = _RETRY.delays()
        while not self._stopping:
            try:
                await self._take()
                if self.error:
                    logger.info("taking work again")
                    delays = _RETRY.delays()
                self.error = ""
            except QueueError as error:
                self.reading = False
                self.error = str(error)
                logger.warning("cannot take work: {}; trying again", error)
                self._reclaim.postpone()
                await anyio.sleep(next(delays))
                await self._recover_own(list(self._consumer.partitions))

    async def take_once(self) -> bool:
        """Claim and read without waiting for new messages; whether there was anything."""
        before = self._dispatched
        if not self._gate.has_room:
            with anyio.move_on_after(_LOOK_AGAIN):
                await self._gate.wait_change()
            return True
        await self._claim()
        if self._may_take:
            await self._read(None)
        return self._dispatched > before

    def stop(self) -> None:
        """Take nothing more. A read that waits is ended by `Consumer.interrupt`."""
        self._stopping = True

    async def _take(self) -> None:
        await self._slots.wait_free()
        while not self._gate.has_room:
            await self._gate.wait_change()
        self.last_read = time.monotonic()
        if self._stopping:
            return
        if returned := self._consumer.returned():
            logger.info("{} of {} partitions are back", len(returned), len(self._consumer.partitions))
            await self._recover_own(returned)
            self._reclaim.request()
        await self._claim()
        if self._gate.dedicated:
            if not self._gate.wanted:
                await self._gate.wait_change()
        elif self._may_take:
            await self._read(self._reclaim.until_next())

    @property
    def _may_take(self) -> bool:
        return bool(self._slots.free and self._gate.has_room and not self._stopping)

    async def _claim(self) -> None:
        """Claim what is due to be claimed, while there is room: suspects first, which are taken one by one."""
        if self._gate.wanted and self._may_take:
            await self._claim_quarantined()
        while self._may_take and not self._gate.dedicated and (turn := self._reclaim.next_claim()) is not None:
            partition, cursor = turn
            if self._consumer.is_away(partition):  # it is swept when it has returned
                self._reclaim.reached(partition, START)
                continue
            try:
                await self._claim_from(partition, cursor)
            except Unavailable as error:
                if not self._consumer.mark_unavailable(partition, error):
                    raise
                logger.warning("queue {}, partition {} is away: {}", partition.queue, partition.index, error)

    async def _claim_from(self, partition: Partition, cursor: str) -> None:
        shared = self._reclaim.is_shared(partition)
        if shared and not await self._consumer.acquire_claim_lock(partition, self._reclaim.lock_ttl):
            self._reclaim.reached(partition, START)
            return
        reached, claimed = await self._consumer.claim(partition, cursor, self._slots.free)
        self._reclaim.reached(partition, reached)
        for delivery in claimed:
            if delivery.count > 1:
                self._gate.pending(delivery)
            self._dispatch(delivery)
        if claimed and not self._slots.free:
            await self._consumer.nudge(partition)

    async def _claim_quarantined(self) -> None:
        """Take one suspect, if there is one in any partition."""
        self._gate.wanted = False  # what is heard from now on is looked for anew
        try:
            for partition in self._consumer.partitions:
                found = await self._consumer.take_quarantined(partition)
                if found.more:
                    self._gate.leave()
                if found.delivery is not None or found.more:
                    self._gate.wanted = True
                if found.delivery is not None:
                    self._gate.pending(found.delivery)
                    self._dispatch(found.delivery)
                    return
        except QueueError:
            self._gate.wanted = True
            raise
        if not self._gate.wanted:
            self._gate.idle()

    async def _read(self, block: float | None) -> None:
        """Read for half of many slots at most, so that one half's outcomes travel while the other half runs.

        While there is plenty, the read does not wait: it goes out with the outcomes, on their connection.
        """
        self.reading = True
        self.last_read = time.monotonic()
        most = min(self._slots.free, max(_FEW, (self._slots.capacity + 1) // 2))
        taken = await self._consumer.read(most, block=None if self._plenty else block)
        self._plenty = len(taken.deliveries) >= most
        for delivery in taken.deliveries:
            if self._slots.free and not self._stopping:
                self._dispatch(delivery)
            else:
                await self._give_back(delivery)
        if taken.due:
            self._on_due()
        if taken.route_changed:
            self._on_route_changed()
        if taken.claimable and self._stopping:
            await self._forward_nudge()
        elif taken.claimable:
            self._reclaim.request()
        if taken.quarantined and not self._stopping:
            self._gate.request()

    async def _forward_nudge(self) -> None:
        """A nudge that reached a worker which is stopping must reach another, or what was given back waits."""
        for partition in self._consumer.partitions:
            await self._consumer.nudge(partition)

    def _dispatch(self, delivery: Delivery) -> None:
        self._dispatched += 1
        self._start(delivery)

    async def _recover_own(self, partitions: Sequence[Partition]) -> None:
        """What Redis handed over while the connection broke is this worker's, though it never heard of it.

        A server that came back empty, or whose streams somebody deleted, has no groups any more.
        """
        try:
            await self._consumer.create_groups(partitions)
            for partition in partitions:
                for delivery in await self._consumer.recover_own(partition):
                    if self._slots.free and not self._stopping:
                        self._dispatch(delivery)
                    else:
                        await self._give_back(delivery)
        except QueueError:
            self._reclaim.request()  # still away: what cannot be adopted is claimed once its lease has passed
            self._reclaim.postpone()
