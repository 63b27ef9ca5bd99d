"""All child processes of a supervisor: start, terminate, and handle their exit."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator

import anyio
from anyio.abc import TaskGroup

from ...queues import ChildInfo, QueueError
from ..log import logger
from ..runtime.supervisor_link import Role
from .child import Child, OnMessage
from .config import SupervisorConfig

__all__ = ["Children"]


class Children:
    """The running child processes. Each has a background task that waits for its exit and handles it.

    Args:
        background: Outlives every child.
        on_message: Called with each message of a child.
        on_exit: Handles the exit of a child; may take as long as it needs.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        background: TaskGroup,
        *,
        on_message: OnMessage,
        on_exit: Callable[[Child], Awaitable[None]],
    ) -> None:
        self._commands = config.commands
        self._timings = config.timings
        self._background = background
        self._on_message = on_message
        self._on_exit = on_exit
        self._running: list[Child] = []
        self._closed = False
        self.stop_limit = self._timings.stop_margin
        """Seconds that a child has to exit after a stop request."""
        self._starting = anyio.Semaphore(max(1, os.cpu_count() or 1))

    def __iter__(self) -> Iterator[Child]:
        """Iterate over the children whose exit is not handled yet."""
        return iter(list(self._running))

    def set_grace(self, grace: float) -> None:
        """Give stopping children this many seconds for their running steps."""
        self.stop_limit = grace + self._timings.stop_margin

    def close(self) -> None:
        """Refuse to spawn further children."""
        self._closed = True

    def infos(self) -> Iterator[ChildInfo]:
        return (child.info for child in self if not child.exited.is_set())

    async def start(self, role: Role) -> Child:
        """Start a process without waiting for it.

        Raises:
            OSError: The operating system could not create the process.
        """
        child = await Child.start(role, self._commands[role], self._on_message)
        self._running.append(child)
        self._background.start_soon(self._handle_exit, child)
        return child

    async def spawn(self, role: Role) -> Child | None:
        """Start a child and wait until it is ready; return None if it failed to start.

        At most one start per processor runs at a time.
        """
        async with self._starting:
            if self._closed:
                return None
            try:
                child = await self.start(role)
            except OSError as error:
                logger.error("could not start a process: {}", error)
                return None
            ready = False
            limit = self._timings.start_limit
            with anyio.move_on_after(limit) as scope:
                ready = await child.wait_ready()
            if scope.cancelled_caught:
                logger.error("process {} was not ready after {:g} s: killed", child.pid, limit)
                child.kill()
            return child if ready else None

    def terminate(self, child: Child) -> None:
        """Request a child to stop, and kill it if it exceeds the stop limit."""
        child.stop()
        self._background.start_soon(self._kill_after_limit, child)

    async def _kill_after_limit(self, child: Child) -> None:
        with anyio.move_on_after(self.stop_limit):
            await child.exited.wait()
        if not child.exited.is_set():
            logger.error("worker {} (process {}) did not stop in time: killed", child.worker, child.pid)
            child.kill()

    async def _handle_exit(self, child: Child) -> None:
        await child.wait()
        try:
            await self._on_exit(child)
        except QueueError as error:
            logger.error(
                "could not report the exit of process {}: {}; its tasks wait for their lease", child.pid, error
            )
        finally:
            self._running.remove(child)
            child.handled.set()
