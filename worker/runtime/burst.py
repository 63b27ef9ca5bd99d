"""Burst mode: work until the queues are empty."""

from __future__ import annotations

import asyncio

import anyio

from ...queues.delivery.consumer import Consumer
from ...queues.delivery.due_set import next_look
from ...queues.runtime import RUNTIME
from ...queues.transport.gateway import Gateway
from ...queues.wording import counted
from ..log import logger
from .executor import Executor
from .intake import Intake
from .maintenance.notices import NoticeDelivery
from .maintenance.partitions import AssignmentWatcher
from .maintenance.promoter import ClockMonitor
from .slots import Slots

_LOOK_AGAIN = 0.05
"""Seconds between two checks for due tasks while no slot changes."""

_REFRESH_AGAIN = 1.0
"""Seconds between two refreshes of the assignment while the burst waits."""


class Burst:
    """A run of the worker that ends when the queues are empty and no task that failed here waits for a retry.

    If leases were restarted, the run also waits until it is known which of them are renewed. Otherwise workers that
    run in bursts, with long pauses between them, would never claim the tasks of one that was killed.
    """

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
        consumer: Consumer,
        assignment: AssignmentWatcher,
        slots: Slots,
        executor: Executor,
        clock: ClockMonitor,
        notices: NoticeDelivery,
        stop: anyio.Event,
    ) -> None:
        self._gateway = gateway
        self._intake = intake
        self._consumer = consumer
        self._assignment = assignment
        self._slots = slots
        self._owed = executor.owed = {}
        self._extras = executor.extras
        self._clock = clock
        self._notices = notices
        self._awaited = 0.0
        self._refreshed = -_REFRESH_AGAIN
        self._stop = stop

    async def run(self) -> None:
        while not self._stop.is_set():
            await self._slots.wait_free()
            if not await self._finds_nothing(refresh=RUNTIME.monotonic() >= self._refreshed + _REFRESH_AGAIN):
                continue
            if self._slots.taken or self._notices.busy or await self._is_owed() or self._awaits_leases():
                with anyio.move_on_after(_LOOK_AGAIN):
                    await self._slots.wait_change()
            elif not await self._admits() and await self._finds_nothing(refresh=True):
                await self._log_paused()
                return  # a retry may have become due after the first check

    async def _admits(self) -> bool:
        """Return, after a moment, whether tasks that wait for limits have their turn: the promoter admits them."""
        if self._extras.busy:
            await anyio.sleep(_LOOK_AGAIN)
            return True
        served = [partition for partition in self._assignment.served if not self._consumer.is_paused(partition)]
        looks = await asyncio.gather(*(next_look(self._gateway, one) for one in served))
        if 0.0 not in looks:
            return False
        await anyio.sleep(_LOOK_AGAIN)
        return True

    async def _log_paused(self) -> None:
        """Log what the queues that an operator has paused have left."""
        for queue in sorted(self._consumer.paused):
            ready = [one.ready for one in self._assignment.served if one.queue == queue]
            if left := sum(await self._gateway.pipeline([("XLEN", stream) for stream in ready])):
                tasks = counted(left, "task is", "tasks are")
                logger.warning("queue {} is paused: {} left; to end that: perdure queue resume {}", queue, tasks, queue)

    async def _finds_nothing(self, *, refresh: bool) -> bool:
        """Take available messages. Return whether no assigned partition had any.

        refresh: look for partitions that were not assigned. A closed one that was read to its end may open the next
        generation of the route.
        """
        moves = self._assignment.moves
        if await self._intake.take_once():
            return False
        if refresh:
            self._refreshed = RUNTIME.monotonic()
            await self._assignment.refresh()
        return moves == self._assignment.moves

    def _awaits_leases(self) -> bool:
        """Return whether restarted leases may still expire; once they may have, claim again."""
        ends = self._clock.restarts_end
        if ends == self._awaited:
            return False
        if ends <= RUNTIME.monotonic():
            self._awaited = ends
            self._intake.sweep()
        return True

    async def _is_owed(self) -> bool:
        """Return whether a task that failed here still waits for its retry; another worker may have run it."""
        for task_id, partition in list(self._owed.items()):
            if await self._gateway.command("ZSCORE", partition.due, task_id) is not None:
                return True
            del self._owed[task_id]
        return False
