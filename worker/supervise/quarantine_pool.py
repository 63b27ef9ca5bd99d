"""Children that run quarantined tasks, one task per process.

One child is always ready. More are started while there are more quarantined tasks, and terminated when idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from ..log import logger
from .child import Child
from .config import AppInfo, SupervisorTimings

__all__ = ["QuarantinePool"]


class QuarantinePool:
    """Pool of quarantine children.

    If one of them dies, its task is the cause: another one starts at once, and the crash does not count towards the
    pause of the supervisor.

    Args:
        spawn: Starts a quarantine child; returns None if it failed to start.
        terminate: Stops a child.
        max_children: Greatest number of children at one time.
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[Child | None]],
        terminate: Callable[[Child], None],
        app: AppInfo,
        max_children: int,
        timings: SupervisorTimings,
    ) -> None:
        self._spawn = spawn
        self._terminate = terminate
        self._app = app
        self._max_children = max_children
        self._timings = timings
        self._children: list[Child] = []
        self._starting = 0
        self._failures = 0
        self._changed = anyio.Event()
        self._wanted = 0

    @property
    def idle(self) -> bool:
        """Whether no quarantined task runs here or is about to."""
        return not self._starting and not self._wanted and all(child.idle for child in self._children)

    async def run(self) -> None:
        """Keep one child ready, and start and terminate others as needed."""
        async with anyio.create_task_group() as starts:
            while True:
                changed = self._changed = anyio.Event()
                self._start_wanted(starts)
                self._terminate_idle()
                with anyio.move_on_after(self._timings.idle_poll):
                    await changed.wait()

    def scale_up(self, tasks: int) -> None:
        """Have idle children check the quarantine, and start more, for at least this number of tasks."""
        free = [child for child in self._children if not child.busy and not child.stop_requests]
        for child in free[:tasks]:
            child.check_quarantine()
        # Start few at a time: a child that finds more tasks than it can run reports that, and more are started.
        few = max(1, os.cpu_count() or 1)
        self._wanted = max(self._wanted, min(tasks - len(free), few) - self._starting, 0)
        self._wanted = min(self._wanted, self._room)
        self._changed.set()

    async def replace_all(self) -> bool:
        """Replace all children: idle ones now, busy ones when their task ends. Return False if the new one fails."""
        old = [child for child in self._children if not child.stop_requests]
        for child in old:
            child.outdated = True
        new = await self._add()
        if new is None:
            for child in old:
                child.outdated = False
            return False
        for child in old:
            if not child.busy and not child.stop_requests:
                self._terminate(child)
        return True

    def on_message(self, child: Child, kind: str) -> None:
        """Note that a child started or ended a task, or found none."""
        if kind == "begins":
            self._failures = 0
        if kind == "ends" and child.outdated and not child.busy and not child.stop_requests:
            self._terminate(child)
        child.idle_since = time.monotonic()
        self._changed.set()

    def on_exit(self, child: Child) -> None:
        """Remove a child that has exited."""
        if child in self._children:
            self._children.remove(child)
        if child.ready.is_set() and child.crashed and not child.busy and not child.stop_requests:
            self._failures += 1  # it ran no task that could have caused the crash
        self._changed.set()

    @property
    def _room(self) -> int:
        return max(0, self._max_children - len(self._children) - self._starting)

    def _start_wanted(self, starts: TaskGroup) -> None:
        if not self._starting and all(child.stop_requests for child in self._children):
            self._wanted = max(self._wanted, 1)
        while self._wanted > 0:
            self._wanted -= 1
            self._starting += 1
            starts.start_soon(self._start_after_delay)

    async def _start_after_delay(self) -> None:
        try:
            await anyio.sleep(self._app.restart_delay(self._failures))
            if await self._add() is None:
                self._failures += 1
                delay = self._app.restart_delay(self._failures)
                logger.error("a quarantine worker failed to start; next try in {:g} s", delay)
        finally:
            self._starting -= 1
            self._changed.set()

    async def _add(self) -> Child | None:
        child = await self._spawn()
        if child is not None:
            child.idle_since = time.monotonic()
            self._children.append(child)
        return child

    def _terminate_idle(self) -> None:
        """Terminate children that were idle for too long, except the newest."""
        running = [child for child in self._children if not child.stop_requests]
        for child in running[:-1]:
            if not child.busy and time.monotonic() - child.idle_since > self._timings.idle_limit:
                self._terminate(child)
