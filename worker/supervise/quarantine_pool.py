"""The children that run suspects: one is kept waiting, more come when there is more to do, and go when there is not."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ..log import logger
from .child import Child
from .config import AppInfo

__all__ = ["QuarantinePool"]

_IDLE: Final = 60.0
"""Seconds after which an isolated child that has nothing to do ends, all but one."""

_LOOK: Final = 5.0
"""Seconds between looks at who has nothing to do."""


class QuarantinePool:
    """Isolated children. What kills one of them is its task's fault, so another one comes at once, and no crash is
    counted against the supervisor.
    """

    def __init__(
        self,
        hire: Callable[[], Awaitable[Child | None]],
        retire: Callable[[Child], None],
        facts: AppInfo,
        most: int,
    ) -> None:
        """hire: starts an isolated child; returns it when it works, None where it ended before. retire: has one stop.
        most: at one time.
        """
        self._hire = hire
        self._retire = retire
        self._facts = facts
        self._most = most
        self._children: list[Child] = []
        self._coming = 0
        self._failures = 0
        self._changed = anyio.Event()
        self._wanted = 0

    @property
    def quiet(self) -> bool:
        """Whether no suspect runs here, nor is about to."""
        return not self._coming and not self._wanted and all(child.quiet for child in self._children)

    def scale_up(self, suspects: int) -> None:
        """There are suspects, at least so many: let as many children look for them."""
        idle = [child for child in self._children if not child.busy and not child.stops]
        for child in idle[:suspects]:
            child.isolate()
        # Few at a time: one that comes and finds more than it can run says so, and so more come while there are any.
        few = max(1, os.cpu_count() or 1)
        self._wanted = max(self._wanted, min(suspects - len(idle), few) - self._coming, 0)
        self._wanted = min(self._wanted, self._room)
        self._note()

    def hear(self, child: Child, what: str) -> None:
        """A child of this ward has said what it does."""
        if what == "begins":
            self._failures = 0
        if what == "ends" and child.outdated and not child.busy and not child.stops:
            self._retire(child)
        child.idle_since = time.monotonic()
        self._note()

    async def keep(self) -> None:
        """Keep one waiting, and have as many as are needed."""
        async with anyio.create_task_group() as coming:
            while True:
                changed = self._changed = anyio.Event()
                self._bring_in(coming)
                self._let_go()
                with anyio.move_on_after(_LOOK):
                    await changed.wait()

    async def renew(self) -> bool:
        """Replace all children: those that wait now, those that are busy when their task has ended. False where the
        new one does not come up.
        """
        old = [child for child in self._children if not child.stops]
        for child in old:
            child.outdated = True
        new = await self._start()
        if new is None:
            for child in old:
                child.outdated = False
            return False
        for child in old:
            if not child.busy and not child.stops:
                self._retire(child)
        return True

    @property
    def _room(self) -> int:
        return max(0, self._most - len(self._children) - self._coming)

    def _bring_in(self, coming: TaskGroup) -> None:
        if not self._coming and all(child.stops for child in self._children):
            self._wanted = max(self._wanted, 1)
        while self._wanted > 0:
            self._wanted -= 1
            self._coming += 1
            coming.start_soon(self._come)

    async def _come(self) -> None:
        try:
            await anyio.sleep(self._facts.delay(self._failures))
            if await self._start() is None:
                self._failures += 1
                delay = self._facts.delay(self._failures)
                logger.error("an isolated worker did not start; it is tried again in {:g} s", delay)
        finally:
            self._coming -= 1
            self._note()

    async def _start(self) -> Child | None:
        child = await self._hire()
        if child is not None:
            child.idle_since = time.monotonic()
            self._children.append(child)
        return child

    def on_exit(self, child: Child) -> None:
        """A child of this ward has ended."""
        if child in self._children:
            self._children.remove(child)
        if child.ready.is_set() and child.crashed and not child.busy and not child.stops:
            self._failures += 1  # by nobody's fault that is known
        self._note()

    def _let_go(self) -> None:
        """End those that have had nothing to do for long, and keep the one that came last."""
        there = [child for child in self._children if not child.stops]
        for child in there[:-1]:
            if not child.busy and time.monotonic() - child.idle_since > _IDLE:
                self._retire(child)

    def _note(self) -> None:
        self._changed.set()
