"""All child processes of a supervisor or worker: start, terminate, and handle their exit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

import anyio
from anyio.abc import TaskGroup

from ....queues.errors import QueueError
from ....queues.runtime import RUNTIME
from ....queues.supervisors import ChildInfo
from ....queues.transport.backoff import Backoff
from ...log import logger
from ..health.report import ALIVE, CONNECTED, CombinedReport, Level, Report
from ..supervisor_link import Role
from .child import Child, ChildCommand, OnMessage, SupervisorTimings, wait_any

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
        self.irreplaceable = ""
        """Why a worker that crashes now cannot be replaced; empty if a spare has imported the app, or has yet to."""

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
            elif not ready and not child.stop_requests and (child.failure or child.code <= 0):  # else it said why
                why = child.failure or f"it ended by {child.exit_status} before it was ready"
                logger.error("process {} could not start: {}", child.pid, why)
            return child if ready else None

    async def keep_spare(self) -> None:
        """Keep one process that has imported the app and waits for a role, so that a replacement is ready at once."""
        delays = _RETRY.delays()
        while not self._closed:
            if await self._load_spare():
                delays = _RETRY.delays()
                if self.irreplaceable:
                    self.irreplaceable = ""
                    logger.info("a worker that crashes can be replaced again: the app was imported")
                await self._spare_gone.wait()
            elif not self._closed:
                await anyio.sleep(next(delays))

    def _note_failed_spare(self, why: str) -> None:
        """Log once that no process can take the place of a worker; further tries follow until one succeeds."""
        if not self.irreplaceable:
            text = "a worker that crashes now cannot be replaced: {}; this is tried again until it succeeds"
            logger.warning(text, why.rstrip("."))
        self.irreplaceable = why

    async def _load_spare(self) -> bool:
        async with self._starting:
            if self._closed:
                return False
            try:
                spare = self._spare = await self.start("spare")
            except OSError as error:
                self._note_failed_spare(f"could not start a process: {error}")
                return False
            self._spare_gone = anyio.Event()
            limit = self._timings.start_limit
            with anyio.move_on_after(limit) as scope:
                await wait_any(spare.loaded, spare.exited)
            if scope.cancelled_caught:
                spare.kill()
            if not spare.loaded.is_set() and not spare.stop_requests and not self._closed:
                late = f"the app was not imported within {limit:g} s"
                ended = f"its process ended by {spare.exit_status} before the app was imported"
                self._note_failed_spare(spare.failure or (late if scope.cancelled_caught else ended))
            return spare.loaded.is_set()

    @property
    def has_spare(self) -> bool:
        """Whether a process that has imported the app can take a role at once."""
        return self._spare is not None and self._spare.loaded.is_set() and not self._spare.exited.is_set()

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


class StallMonitor:
    """Periodic check of all children.

    A healthy child sends a heartbeat every second that says for how long its event loop has not responded. A child
    whose loop lags for longer than the limit, or that sends nothing for so long (its interpreter is stuck in C code),
    dumps its stacks and is killed. Children that were requested to stop have a time limit of their own.

    Args:
        limit: Seconds.
    """

    def __init__(self, children: Iterable[Child], limit: float, timings: SupervisorTimings) -> None:
        self._children = children
        self._limit = limit
        self._timings = timings
        self._frozen_after = min(timings.frozen_after, limit / 2)
        self._last_check: float | None = None

    async def run(self) -> None:
        async with anyio.create_task_group() as aborts:
            while True:
                for child in self.find_stalled(RUNTIME.monotonic()):
                    aborts.start_soon(child.abort, "stalled", self._timings.abort_limit)
                await anyio.sleep(min(self._timings.heartbeat_interval, self._limit / 4))

    def find_stalled(self, now: float) -> list[Child]:
        """Return the children that stopped responding, and log them."""
        if self._last_check is not None and now - self._last_check > self._frozen_after:
            self._restart_clocks(now)
        self._last_check = now
        return [child for child in self._children if self._is_stalled(child, now)]

    def _restart_clocks(self, now: float) -> None:
        """Discard the silence of all children: this process was frozen, and could not read their heartbeats."""
        for child in self._children:
            if child.last_heartbeat is not None:
                child.last_heartbeat = now

    def _is_stalled(self, child: Child, now: float) -> bool:
        if child.last_heartbeat is None or child.stalled or child.stop_requests or child.exited.is_set():
            return False
        silent = now - child.last_heartbeat
        if max(child.loop_lag, silent) <= self._limit:
            return False
        logger.error(
            "worker {} (process {}) stalled: {} for {:.0f} s; dumping its stacks, then killing it",
            child.worker,
            child.pid,
            "event loop did not respond" if child.loop_lag > self._limit else "no heartbeat",
            max(child.loop_lag, silent),
        )
        return True


def health_of(children: Iterable[Child], heartbeat_limit: float, reasons: Iterable[str] = ()) -> CombinedReport:
    """Return the health of all children that were not requested to stop. Thread-safe.

    Args:
        heartbeat_limit: Seconds without a heartbeat, after which a child is not alive.
        reasons: Sentences about the supervisor.
    """
    reports = [
        (child.role, _report(child, heartbeat_limit))
        for child in children
        if not child.stop_requests and not child.exited.is_set()
    ]
    return CombinedReport(
        [report for role, report in reports if role == "worker"],
        [report for role, report in reports if role == "isolated"],
        reasons,
    )


def _report(child: Child, heartbeat_limit: float) -> Report:
    name = child.worker or f"process {child.pid}"
    silent = 0.0 if child.last_heartbeat is None else RUNTIME.monotonic() - child.last_heartbeat
    if silent > heartbeat_limit:
        remedy = "its interpreter is stuck; the supervisor replaces it after the stall limit"
        return Report(name, (Level(ALIVE, False, f"no heartbeat for {silent:.0f} s", remedy),))
    if not child.health:
        return Report(name, (Level(CONNECTED, False, "it is still starting"),))
    try:
        return Report.from_summary(child.health)
    except (KeyError, TypeError):
        return Report(name, (Level(ALIVE, True, "it sends no health report"),))
