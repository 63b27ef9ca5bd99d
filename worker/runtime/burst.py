"""Working until the queues are empty."""

from __future__ import annotations

import anyio

from ...queues import Gateway
from .executor import Executor
from .intake import Intake
from .maintenance import AssignmentWatcher
from .slots import Slots

__all__ = ["Burst"]

_LOOK_AGAIN = 0.05
"""Seconds after which due tasks are looked for when nothing else happens."""


class Burst:
    """Takes work without waiting for new messages, until none is left and nothing that failed here is owed."""

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
        assignment: AssignmentWatcher,
        slots: Slots,
        executor: Executor,
        stop: anyio.Event,
    ) -> None:
        self._gateway = gateway
        self._intake = intake
        self._assignment = assignment
        self._slots = slots
        self._owed = executor.owed = {}
        self._stop = stop

    async def run(self) -> None:
        while not self._stop.is_set():
            await self._slots.wait_free()
            if not await self._finds_nothing():
                continue
            if self._slots.taken or await self._is_owed():
                with anyio.move_on_after(_LOOK_AGAIN):
                    await self._slots.wait_change()
            elif await self._finds_nothing():  # what was owed may have come due after the first look
                return

    async def _finds_nothing(self) -> bool:
        """Take what there is; whether that was nothing, in all partitions that are to be read by now.

        What was just read to its end may open the next generation.
        """
        moves = self._assignment.moves
        if await self._intake.take_once():
            return False
        await self._assignment.refresh()
        return moves == self._assignment.moves

    async def _is_owed(self) -> bool:
        """Whether a task that failed here still waits for its time; another worker may have run it meanwhile."""
        for task_id, partition in list(self._owed.items()):
            if await self._gateway.command("ZSCORE", partition.due, task_id) is not None:
                return True
            del self._owed[task_id]
        return False
