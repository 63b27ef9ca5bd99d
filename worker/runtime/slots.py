"""The bound on what runs at once, and what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..log import logger

__all__ = ["Slots"]


class Slots:
    """As many slots as the worker's concurrency. Only the intake fills them.

    A slot is free again when its work ends, or a little earlier: when nothing is left of it but an outcome on its way
    to Redis. So the next messages are asked for right behind the outcomes, in the same round trip.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: set[asyncio.Task[Any]] = set()
        self._busy: set[asyncio.Task[Any]] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def taken(self) -> int:
        """How many tasks are not done with, those that are leaving included."""
        return len(self._running)

    @property
    def busy(self) -> int:
        """How many run: those that are leaving have ended, but for their outcome."""
        return len(self._busy)

    @property
    def leaked_slots(self) -> int:
        """How many are taken by work that does not end."""
        return len(self._busy - self._running)

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self._busy))

    def fill(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run some work in a slot: in an asyncio task of its own, so with context variables of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        self._busy.add(task)
        task.add_done_callback(self._ended)

    def leave(self) -> None:
        """The work that calls this is about to send its outcome, and needs its slot no more."""
        task = asyncio.current_task()
        if task in self._busy:
            self._busy.discard(task)
            self._announce()

    def mark_leaked(self, task: asyncio.Task[Any]) -> None:
        """The work in this slot does not end: nobody waits for it any more, and the slot stays taken until it does."""
        self._running.discard(task)
        self._announce()

    def stay(self) -> None:
        """The outcome did not get through: the slot is needed on, or outcomes would pile up while Redis is away."""
        task = asyncio.current_task()
        if task in self._running:
            self._busy.add(task)

    async def wait_free(self) -> None:
        """Return when a slot is free."""
        while not self.free:
            await self.wait_change()

    async def wait_empty(self) -> None:
        """Return when nothing runs."""
        while self._running:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Return when a slot is given back."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    async def cancel(self) -> None:
        """Cancel what runs, and return when all of it has ended."""
        for task in list(self._running):
            task.cancel()
        await self.wait_empty()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._busy.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.opt(exception=error).error("the worker failed; the task is left for recovery")
        self._announce()

    def _announce(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)
