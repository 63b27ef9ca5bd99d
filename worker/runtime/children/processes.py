"""All child processes of a supervisor or worker: start, terminate, and handle their exit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
from anyio.abc import TaskGroup

from ....queues.errors import QueueError
from ....queues.runtime import RUNTIME
from ....queues.supervisors import ChildInfo
from ....queues.transport.backoff import Backoff
from ...log import logger
from ..supervisor_link import Role
from .app_command import ChildCommand
from .child import Child, OnMessage, wait_any
from .timings import SupervisorTimings

_RETRY = Backoff(first=1.0, longest=60.0)
"""Delays before a spare that failed to start is started again."""


class Children:
    """The running child processes. Each has a background task that waits for its exit and handles it.

    Args:
        background: Outlives every child.
        on_message: Called with each message of a child.
        on_exit: Handles the exit of a child; may take as long as it needs.
    """

    def __init__(
        self,
        command: ChildCommand,
        timings: SupervisorTimings,
        background: TaskGroup,
        *,
        on_message: OnMessage,
        on_exit: Callable[[Child], Awaitable[None]],
    ) -> None:
        self._command = command
        self._timings = timings
        self._background = background
        self._on_message = on_message
        self._on_exit = on_exit
        self._running: list[Child] = []
        self._closed = False
        self.stop_limit = self._timings.stop_margin
        """Seconds that a child has to exit after a stop request."""
        self._starting = anyio.Semaphore(RUNTIME.cpus())
        self._spare: Child | None = None
        self._spare_gone = anyio.Event()

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
        child = await Child.start(role, self._command, self._on_message)
        self._running.append(child)
        self._background.start_soon(self._handle_exit, child)
        return child

    async def spawn(self, role: Role) -> Child | None:
        """Start a child and wait until it is ready; return None if it failed to start.

        The spare is taken if there is one. At most one start per processor runs at a time.
        """
        async with self._starting:
            if self._closed:
                return None
            child = self._take_spare()
            if child is not None:
                child.assign(role)
            else:
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
            elif not ready and child.code <= 0 and not child.stop_requests:  # with another code, it logged its error
                logger.error("process {} ended by {} before it was ready", child.pid, child.exit_status)
            return child if ready else None

    async def keep_spare(self) -> None:
        """Keep one process that has imported the app and waits for a role, so that a replacement is ready at once."""
        delays = _RETRY.delays()
        while not self._closed:
            if await self._load_spare():
                delays = _RETRY.delays()
                await self._spare_gone.wait()
            else:
                await anyio.sleep(next(delays))

    async def _load_spare(self) -> bool:
        async with self._starting:
            if self._closed:
                return False
            try:
                spare = self._spare = await self.start("spare")
            except OSError as error:
                logger.error("could not start a process: {}", error)
                return False
            self._spare_gone = anyio.Event()
            with anyio.move_on_after(self._timings.start_limit) as scope:
                await wait_any(spare.loaded, spare.exited)
            if scope.cancelled_caught:
                spare.kill()
            return spare.loaded.is_set()

    def discard_spare(self) -> None:
        """Replace the spare: it may have loaded old code."""
        spare = self._take_spare()
        if spare is not None:
            self.terminate(spare)

    def _take_spare(self) -> Child | None:
        spare, self._spare = self._spare, None
        self._spare_gone.set()
        return spare

    def terminate(self, child: Child) -> None:
        """Request a child to stop unless that is done, and kill it if it exceeds the stop limit."""
        if not child.stop_requests:
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
        if child is self._spare:
            self._take_spare()
        try:
            await self._on_exit(child)
        except QueueError as error:
            logger.error(
                "could not report the exit of process {}: {}; its tasks wait for their lease", child.pid, error
            )
        finally:
            self._running.remove(child)
            child.handled.set()
