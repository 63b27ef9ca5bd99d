"""Slots: the bound on concurrent executions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from ...queues.runtime import RUNTIME
from ..log import logger

_PAUSE = 0.001
"""Seconds between two resumed tasks, longer than resuming one takes: new tasks start in between."""

_LOOK = 0.25
"""Seconds after which an execution that waits for slots looks whether it is to end."""


class Slots:
    """A fixed number of slots, one per concurrent execution. Only the intake loop fills them.

    A slot becomes free when its execution ends, or already when only the outcome is left to store. So the next messages
    are requested in the same round trip as the outcomes.

    A large execution takes several slots: the number is known after its message was read, so it takes one first, and
    then waits for the others. Its slots count as taken from then on, so that no new execution gets ahead of it. Large
    executions that wait take turns; the first one starts when the running ones leave it enough, so no two wait for each
    other.
    """

    def __init__(self, capacity: int, largest: int = 1) -> None:
        """largest: slots of the largest execution."""
        self.capacity = capacity
        self.usable = capacity
        """Slots that may be filled now; fewer than the capacity if the worker is short of memory or its loop lags."""
        self._largest = max(1, min(largest, capacity))
        self._more: dict[asyncio.Task[Any], int] = {}
        self._extra = 0
        self._turns: dict[asyncio.Task[Any], int] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._busy: set[asyncio.Task[Any]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._lost_threads = 0
        self._lost_slots = 0
        self._turn = asyncio.Lock()
        self._next_turn = 0.0

    @property
    def taken(self) -> int:
        """Number of executions, including those that only store their outcome."""
        return len(self._running)

    @property
    def busy(self) -> int:
        """Number of executions that still occupy a slot."""
        return len(self._busy)

    @property
    def leaked_slots(self) -> int:
        """Number of slots whose execution does not end."""
        leaked = self._busy - self._running
        return len(leaked) + sum(self._more.get(task, 0) for task in leaked) + self._lost_slots

    @property
    def stuck(self) -> int:
        """Number of handlers that do not end."""
        return len(self._busy - self._running) + self._lost_threads

    @property
    def used(self) -> int:
        """Number of slots that are taken, including those for which a large execution waits."""
        return len(self._busy) + self._extra + self._lost_slots

    @property
    def free(self) -> int:
        return max(0, self.usable - self.used)

    @property
    def room(self) -> int:
        """Number of messages to ask for: as many as fit if all are large, and one while a slot is free."""
        return self.free if self._largest == 1 else min(self.free, max(1, self.free // self._largest))

    def limit(self, usable: int) -> None:
        """Let only so many slots be filled. Those that are taken stay so."""
        if usable != self.usable:
            self.usable = usable
            self._announce()

    @property
    def spare(self) -> int:
        """Number of idle tasks that may start: each finds at least half of the slots free, also if all are large.

        One if nothing runs: of a worker that may fill few slots for long, no idle task would be run otherwise.
        """
        beyond = self.free - (self.capacity + 1) // 2
        return beyond // self._largest + 1 if beyond >= 0 else int(self.free > 0 and not self.used)

    def held(self) -> int:
        """Return the number of slots of the calling execution."""
        task = asyncio.current_task()
        return 1 if task is None else 1 + self._more.get(task, 0)

    def fill(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in a slot, in a new asyncio task with its own context variables."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        self._busy.add(task)
        task.add_done_callback(self._ended)

    def leave(self) -> None:
        """Free the slot of the calling execution, which is about to store its outcome."""
        task = asyncio.current_task()
        if task in self._busy:
            self._busy.discard(task)
            self._extra -= self._more.get(task, 0)
            self._announce()

    def mark_leaked(self, task: asyncio.Task[Any]) -> None:
        """Stop waiting for an execution that does not end. Its slot stays occupied until it does."""
        self._running.discard(task)
        self._announce()

    def leak(self, change: int) -> None:
        """Add or remove the slots of one handler whose thread runs on after its execution."""
        self._lost_threads += 1 if change > 0 else -1
        self._lost_slots += change
        self._announce()

    def stay(self) -> None:
        """Occupy the slot of the calling execution again, so that outcomes do not pile up without Redis."""
        task = asyncio.current_task()
        if task in self._running and task not in self._busy:
            self._busy.add(task)
            self._extra += self._more.get(task, 0)

    async def enlarge(self, slots: int, ends: Callable[[], bool]) -> None:
        """Return when the calling execution has so many slots, all if there are fewer, or when it is to end.

        ends: whether the execution is to end without them, looked at several times per second.
        """
        task = asyncio.current_task()
        slots = min(slots, self.capacity)
        if task is None or task not in self._busy or slots <= 1:
            return
        self._more[task] = slots - 1
        self._extra += slots - 1
        self._turns[task] = slots
        try:
            while not ends() and not self._may_start(task, slots):
                with anyio.move_on_after(_LOOK):
                    await self.wait_change()
        finally:
            del self._turns[task]
            self._announce()

    def _may_start(self, task: asyncio.Task[Any], slots: int) -> bool:
        """Return whether a large execution is the next one, and the running ones leave it its slots.

        It does not wait for those of executions that do not end.
        """
        running = self.used - sum(self._turns.values())
        return next(iter(self._turns)) is task and running <= max(self.capacity - slots, self.leaked_slots)

    async def wait_turn(self) -> None:
        """Return when the calling execution may resume its task: they do so one after the other, with pauses.

        Many of them at once would keep the event loop busy for some milliseconds each time, and new tasks would wait.
        """
        async with self._turn:
            pause = self._next_turn - RUNTIME.monotonic()
            if pause > 0:
                await anyio.sleep(pause)
            self._next_turn = RUNTIME.monotonic() + _PAUSE

    async def wait_free(self) -> None:
        """Return when a slot is free."""
        while not self.free:
            await self.wait_change()

    async def wait_empty(self) -> None:
        """Return when no execution is left."""
        while self._running:
            await self.wait_change()

    async def wait_empty_or(self, event: anyio.Event) -> None:
        """Return when no execution is left, or the event is set."""

        async def cancel_on_event() -> None:
            await event.wait()
            waiting.cancel_scope.cancel()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(cancel_on_event)
            await self.wait_empty()
            waiting.cancel_scope.cancel()

    async def wait_change(self) -> None:
        """Return when a slot changes."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    async def cancel(self) -> None:
        """Cancel all executions and return when they have ended."""
        for task in list(self._running):
            task.cancel()
        await self.wait_empty()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task in self._busy:
            self._busy.discard(task)
            self._extra -= self._more.get(task, 0)
        if self._more:
            self._more.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.opt(exception=error).error("execution failed; the task will be reclaimed after the lease")
        self._announce()

    def _announce(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)
