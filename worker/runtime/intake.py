"""The intake loop of a worker: it claims and reads messages and gives each delivery a slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from ...queues.delivery.consumer import Consumer
from ...queues.delivery.leases import Delivery
from ...queues.errors import QueueError, Unavailable
from ...queues.keys import Partition
from ...queues.lanes import IDLE, Lane
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import Backoff
from ..log import logger
from ..loop_errors import LoopErrors
from .quarantine_gate import QuarantineGate
from .reclaim import START, ReclaimSchedule
from .slots import Slots

_RETRY = Backoff(first=0.1, longest=5.0)
"""Delays before messages are asked for again after an error."""

_LOOK_AGAIN = 0.05
"""Seconds after which a burst checks again whether a quarantined task has ended."""

_FEW = 8
"""A read asks for up to this many messages, even if that fills all slots."""


class Intake:
    """The only loop of a worker that claims and reads messages.

    It claims before it reads, and never takes more messages than there are free slots.
    """

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
        on_lane: Callable[[str, Lane], None] = lambda *_: None,
    ) -> None:
        """Create the loop; `run` or `take_once` runs it.

        Args:
            start: Starts the execution of a delivery in a slot.
            on_due: Called when a nudge says that due times have changed.
            on_route_changed: Called when a nudge says that a partition was closed.
            give_back: Releases a delivery for which no slot is free.
            on_lane: Called with a queue and a lane that a producer asks for.
        """
        self._consumer = consumer
        self._slots = slots
        self._reclaim = reclaim
        self._gate = gate
        self._start = start
        self._on_due = on_due
        self._on_route_changed = on_route_changed
        self._on_lane = on_lane
        self._give_back = give_back
        self._stopping = False
        self._plenty = False
        self._dispatched = 0
        self._errors = LoopErrors("read messages")
        self.reading = False
        self.last_read = RUNTIME.monotonic()
        """Time of the last read or claim (monotonic clock, seconds)."""
        self.error = ""
        """Text of the last error, empty while the loop works."""

    async def run(self) -> None:
        """Take messages until `stop` is called. An unavailable Redis delays the loop and does not end it."""
        delays = _RETRY.delays()
        while not self._stopping:
            try:
                await self._take()
                if self.error:
                    logger.info("reading messages again")
                    delays = _RETRY.delays()
                self.error = ""
            except QueueError as error:
                self.reading = False
                self.error = str(error)
                problem = error.problem if isinstance(error, Unavailable) else str(error).rstrip(".")
                logger.warning("could not read messages: {}; retrying", problem)
                await anyio.sleep(next(delays))
                await self._recover_own(list(self._consumer.partitions))
            except Exception as error:  # noqa: BLE001 - the loop ends with the worker only
                self.reading = False
                self.error = f"{type(error).__name__}: {error}"
                self._errors.note(error)
                await anyio.sleep(next(delays))
                await self._recover_own(list(self._consumer.partitions))

    async def take_once(self) -> bool:
        """Claim and read without blocking. Return whether a delivery was started."""
        before = self._dispatched
        if not self._gate.has_room:
            with anyio.move_on_after(_LOOK_AGAIN):
                await self._gate.wait_change()
            return True
        await self._claim()
        if self._may_take:
            await self._read(None)
        return self._dispatched > before

    def sweep(self) -> None:
        """Claim from all partitions at the next opportunity."""
        self._reclaim.request()

    async def claim(self) -> None:
        """Claim from all partitions now; a blocking read ends."""
        self._reclaim.request()
        await self._consumer.interrupt()

    def stop(self) -> None:
        """Take no more messages. `Consumer.interrupt` ends a blocking read."""
        self._stopping = True

    async def _take(self) -> None:
        await self._slots.wait_free()
        while not self._gate.has_room:
            await self._gate.wait_change()
        self.last_read = RUNTIME.monotonic()
        if self._stopping:
            return
        if returned := self._consumer.returned():
            logger.info("{} of {} partitions are available again", len(returned), len(self._consumer.partitions))
            await self._recover_own(returned)
            self._reclaim.request()
        await self._claim()
        if self._gate.dedicated:
            if not self._gate.wanted:
                await self._gate.wait_change()
        elif self._may_take:
            await self._read(self._reclaim.until_next(spare=self._has_spare))

    @property
    def _may_take(self) -> bool:
        return bool(self._slots.free and self._gate.has_room and not self._stopping)

    @property
    def _has_spare(self) -> bool:
        """Whether idle tasks may be claimed: the other lanes were empty, and half of the slots are free."""
        return self._consumer.spare and self._slots.spare > 0

    async def _claim(self) -> None:
        """Claim what the schedule asks for while slots are free; quarantined tasks first, one at a time."""
        if self._gate.wanted and self._may_take:
            await self._claim_quarantined()
        while self._may_take and not self._gate.dedicated:
            if (claim := self._reclaim.next_claim(spare=self._has_spare)) is None:
                return
            partition, cursor = claim
            if self._consumer.is_away(partition):  # claimed from when it is available again
                self._reclaim.reached(partition, START)
                continue
            try:
                await self._claim_from(partition, cursor)
            except Unavailable as error:
                if not self._consumer.mark_unavailable(partition, error):
                    raise
                logger.warning("queue {}, partition {} is unavailable: {}", partition.queue, partition.index, error)

    async def _claim_from(self, partition: Partition, cursor: str) -> None:
        shared = self._reclaim.is_shared(partition)
        if shared and not await self._consumer.acquire_claim_lock(partition, self._reclaim.lock_ttl):
            self._reclaim.reached(partition, START)
            return
        if self._consumer.is_paused(partition):  # claimed after the pause; its leases are attended meanwhile
            await self._consumer.touch(partition)
            self._reclaim.reached(partition, START)
            return
        most = min(self._slots.spare, self._slots.room) if partition.lane == IDLE else self._slots.room
        reached, claimed = await self._consumer.claim(partition, cursor, most)
        self._reclaim.reached(partition, reached)
        for delivery in claimed:
            if not self._slots.free or self._consumer.is_paused(partition):
                # an execution has occupied its slot again, or the queue was paused, since the claim was sent
                await self._give_back(delivery)
                continue
            if delivery.count > 1:
                self._gate.pending(delivery)
            self._dispatch(delivery)
        if claimed and not self._slots.free:
            await self._consumer.nudge(partition)

    async def _claim_quarantined(self) -> None:
        """Take one quarantined task, if any partition has one."""
        self._gate.wanted = False  # a request that arrives from here on leads to another search
        try:
            for partition in self._consumer.partitions:
                if self._consumer.is_paused(partition):
                    continue
                found = await self._consumer.take_quarantined(partition)
                self._gate.found(more=found.more)
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
        """Read new messages, for at most half of the slots if there are many.

        So the outcomes of one half travel while the other half runs. While the queue has more messages than slots, the
        read does not block and shares a round trip with the outcomes.
        """
        self.reading = True
        self.last_read = RUNTIME.monotonic()
        most = min(self._slots.room, max(_FEW, (self._slots.capacity + 1) // 2))
        taken = await self._consumer.read(most, block=None if self._plenty else block, spare=self._slots.spare)
        self._plenty = len(taken.deliveries) >= most
        for delivery in taken.deliveries:
            if self._may_start(delivery):
                self._dispatch(delivery)
            else:
                await self._give_back(delivery)
        if taken.due:
            self._on_due()
        if taken.route_changed:
            self._on_route_changed()
        for queue, lane in taken.lanes:
            self._on_lane(queue, lane)
        if taken.claimable and self._stopping:
            await self._forward_nudge()
        elif taken.claimable:
            self._reclaim.request()
        if taken.quarantined and not self._stopping:
            self._gate.request()

    async def _forward_nudge(self) -> None:
        """Forward a nudge that reached this stopping worker, so that another worker claims the released messages."""
        for partition in self._consumer.partitions:
            await self._consumer.nudge(partition)

    def _may_start(self, delivery: Delivery) -> bool:
        """Return whether a delivery may start; its queue may have been paused since the read was sent."""
        return bool(self._slots.free) and not self._stopping and not self._consumer.is_paused(delivery.partition)

    def _dispatch(self, delivery: Delivery) -> None:
        self._dispatched += 1
        self._start(delivery)

    async def _recover_own(self, partitions: Sequence[Partition]) -> None:
        """Start deliveries that Redis assigned to this worker in replies that were lost with the connection.

        Also create the consumer groups again: a server that restarted without its data has none.
        """
        try:
            await self._consumer.create_groups(partitions)
            for partition in partitions:
                for delivery in await self._consumer.recover_own(partition):
                    if self._may_start(delivery):
                        self._dispatch(delivery)
                    else:
                        await self._give_back(delivery)
        except QueueError:
            self._reclaim.request()  # still unavailable: the messages are claimed after their lease
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._errors.note(error)
            self._reclaim.request()
