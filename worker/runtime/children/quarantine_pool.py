"""Children that run quarantined tasks, one task per process: started while there are such tasks, terminated when idle.

A child whose task has survived the probation time takes up no place: it runs an ordinary task to its end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ....queues.runtime import RUNTIME
from ...log import logger
from .child import Child, SupervisorTimings

_MAX: Final = 16
"""Default limit of quarantine children: each is a process."""


def default_children(slots: int) -> int:
    """Return the default limit of quarantine children for a number of slots."""
    return max(2, min(_MAX, slots))


class QuarantinePool:
    """Pool of quarantine children.

    If one of them dies, its task is the cause: another one starts at once, and the crash does not count towards the
    pause of the supervisor.

    Args:
        spawn: Starts a quarantine child; returns None if it failed to start.
        terminate: Stops a child.
        restart_delay: Returns the seconds before the next start after a number of failures.
        max_children: Greatest number of children at one time, without those whose task has survived.
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[Child | None]],
        terminate: Callable[[Child], None],
        restart_delay: Callable[[int], float],
        max_children: int,
        timings: SupervisorTimings,
    ) -> None:
        self._spawn = spawn
        self._terminate = terminate
        self._restart_delay = restart_delay
        self._max_children = max_children
        self._timings = timings
        self._children: list[Child] = []
        self._starting = 0
        self._failures = 0
        self._changed = anyio.Event()
        self._wanted = 0
        self._exited: list[Child] = []
        self.unmet = False
        """Whether the last child failed to start, and none has looked for a quarantined task since."""
        self.ended = 0
        """Number of quarantined tasks whose runs have ended here, in whatever way."""

    @property
    def idle(self) -> bool:
        """Whether no quarantined task runs here or is about to, and none is still to be released after a crash."""
        self._exited = [child for child in self._exited if not child.handled.is_set()]
        starting = self._starting or self._wanted
        return not starting and not self._exited and all(child.idle for child in self._children)

    async def run(self) -> None:
        """Start and terminate children as needed."""
        async with anyio.create_task_group() as starts:
            while True:
                changed = self._changed = anyio.Event()
                self._start_wanted(starts)
                self._terminate_idle()
                with anyio.move_on_after(self._timings.idle_poll):
                    await changed.wait()

    def scale_up(self, tasks: int) -> None:
        """Ask idle children to check the quarantine, and start more, for at least this number of tasks."""
        free = [child for child in self._children if not child.busy and not child.stop_requests]
        for child in free[:tasks]:
            child.idle_since = RUNTIME.monotonic()  # else it might be terminated before it has looked
            child.check_quarantine()
        # Start few at a time: a child that finds more tasks than it can run reports that, and more are started.
        few = RUNTIME.cpus()
        self._wanted = max(self._wanted, min(tasks - len(free), few) - self._starting, 0)
        self._wanted = min(self._wanted, self._room)
        self._changed.set()

    def retire_all(self) -> None:
        """Terminate all children: idle ones now, busy ones when their task ends."""
        for child in self._children:
            child.outdated = True
            if not child.busy:
                self._terminate_once(child)

    def on_message(self, child: Child, kind: str) -> None:
        """Note that a child started or ended a task, that its task has survived, or that it found none."""
        self.unmet = self.unmet and kind not in ("begins", "idle")
        if kind == "begins":
            self._failures = 0
        elif kind == "survived":
            self.scale_up(1)  # others may have waited for its place
        elif kind == "ends":
            self.ended += 1
            if not child.busy and (child.outdated or self._excess > 0):
                self._terminate_once(child)
        child.idle_since = RUNTIME.monotonic()
        self._changed.set()

    def on_exit(self, child: Child) -> None:
        """Remove a child that has exited."""
        if child not in self._children:  # it is starting: `_start_after_delay` sees its exit
            return
        self._children.remove(child)
        self._exited.append(child)
        self.ended += child.busy
        if child.crashed and not child.busy and not child.stop_requests:
            self._failures += 1  # it ran no task that could have caused the crash
            self.scale_up(1)  # it was to look for a task
        self._changed.set()

    @property
    def _excess(self) -> int:
        """Number of places that are taken, or about to be, above the limit; negative if there is room."""
        survivors = [child for child in self._children if child.survived]
        return len(self._children) - len(survivors) + self._starting - self._max_children

    @property
    def _room(self) -> int:
        return max(0, -self._excess)

    def _start_wanted(self, starts: TaskGroup) -> None:
        while self._wanted > 0:
            self._wanted -= 1
            self._starting += 1
            starts.start_soon(self._start_after_delay)

    async def _start_after_delay(self) -> None:
        child = None
        try:
            await anyio.sleep(self._restart_delay(self._failures))
            child = await self._spawn()
            if child is not None:
                child.idle_since = RUNTIME.monotonic()
                self._children.append(child)
            else:
                self._failures += 1
                self.unmet = True
                delay = self._restart_delay(self._failures)
                logger.error("a quarantine worker failed to start; next try in {:g} s", delay)
        finally:
            self._starting -= 1
            self._changed.set()
        if child is None:
            return
        if child.exited.is_set():
            self.on_exit(child)
        elif child.busy:
            self.scale_up(1)  # requests that came since it has its task counted on it

    def _terminate_idle(self) -> None:
        """Terminate children that were idle for too long."""
        for child in self._children:
            if not child.busy and RUNTIME.monotonic() - child.idle_since > self._timings.idle_limit:
                self._terminate_once(child)

    def _terminate_once(self, child: Child) -> None:
        if not child.stop_requests:
            self._terminate(child)
