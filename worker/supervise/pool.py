"""Ordinary children of a supervisor: one slot for each, restart after a crash, replacement and reload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from ...queues.runtime import RUNTIME
from ..log import logger
from ..runtime.children.child import Child
from ..runtime.children.processes import Children
from ..runtime.children.quarantine_pool import QuarantinePool
from ..runtime.service_manager import ServiceManager
from .config import AppInfo, SupervisorConfig
from .crash_counter import SupervisorRegistry


class WorkerSlot:
    """A place for one ordinary child, kept filled.

    A child that crashes is replaced after a delay, after the first crash at once if the spare can take over. While the
    supervisor is paused, nothing is replaced.

    Args:
        spawn: Starts a child; returns None if it failed to start.
        has_spare: Returns whether a child would be ready at once.
        terminate: Stops a child.
        shortest_run: Seconds of delay before the replacement of a child that exited sooner than this.
        burst: Whether a child that exited with code 0 is not replaced.
        reloads: Whether a child that was replaced is not waited for, since a reload in development is not to last as
            long as a task's step.
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[Child | None]],
        has_spare: Callable[[], bool],
        terminate: Callable[[Child], None],
        registry: SupervisorRegistry,
        app: AppInfo,
        *,
        shortest_run: float,
        burst: bool,
        reloads: bool = False,
    ) -> None:
        self.child: Child | None = None
        self._spawn = spawn
        self._has_spare = has_spare
        self._terminate = terminate
        self._registry = registry
        self._app = app
        self._shortest_run = shortest_run
        self._burst = burst
        self._reloads = reloads
        self._filling = anyio.Lock()
        self._failures = 0

    async def run(self) -> None:
        """Keep the slot filled, until its child was drained.

        In a burst, return when its child has exited with code 0 or a pause begins.
        """
        delay = 0.0
        while True:
            if self.child is None:
                if self._burst and self._registry.state.paused:
                    return
                await self._wait_to_start(delay)
                delay = await self._fill()
                continue
            child = self.child
            await child.handled.wait()
            if self.child is not child:
                continue  # replaced
            self.child = None
            if child.draining or (self._burst and not child.crashed):
                return
            delay = self._delay_after(child)

    async def replace(self, only: Child | None = None) -> bool:
        """Spawn a new child, then terminate the old one; return False if the new one failed to start.

        Args:
            only: Do nothing unless this child holds the slot.
        """
        async with self._filling:
            old = self.child
            if old is None or old.stop_requests or old.draining or only not in (None, old):
                return True  # the current or next child is a new one already, or none follows
            new = await self._spawn()
            if new is None:
                return False
            self.child = new
        self._terminate(old)
        if not self._reloads:
            await old.handled.wait()
        return True

    async def _wait_to_start(self, delay: float) -> None:
        with anyio.move_on_after(delay):
            await self._registry.wait_resumed()
        await self._registry.wait_unpaused()

    async def _fill(self) -> float:
        """Spawn a child; return the seconds until the next try if it failed to start."""
        async with self._filling:
            if self.child is not None:
                return 0.0
            self.child = await self._spawn()
        if self.child is not None:
            self._failures = 0
            return 0.0
        self._failures += 1
        delay = self._app.restart_delay(self._failures)
        logger.error("a worker failed to start (see above); next try in {:g} s", delay)
        return delay

    def _delay_after(self, child: Child) -> float:
        shortest = 0.0 if RUNTIME.monotonic() - child.started_at > self._shortest_run else self._shortest_run
        if not child.crashed:
            return shortest
        if not child.counts_as_crash:
            logger.warning("the worker had made progress before it crashed: starting another one")
            return shortest
        takes_over = child.crashes == 1 and self._has_spare()
        delay = 0.0 if takes_over else self._app.restart_delay(child.crashes)
        if not self._registry.state.paused:
            logger.warning(
                "crash {} without progress within {:g} s: starting another worker in {:g} s",
                child.crashes,
                self._app.crash_window,
                delay,
            )
        return delay


class WorkerPool:
    """All children that a supervisor keeps running: the slots of the ordinary ones, and the quarantine pool."""

    def __init__(
        self,
        config: SupervisorConfig,
        app: AppInfo,
        registry: SupervisorRegistry,
        children: Children,
        service: ServiceManager,
    ) -> None:
        self._registry = registry
        self._service = service
        self._children = children
        self._burst = config.burst
        self._keeps_spare = not config.burst and config.sources is None  # a spare would soon have loaded old code
        self._burst_poll = config.timings.burst_poll
        self._quarantine = QuarantinePool(
            lambda: children.spawn("isolated"),
            children.terminate,
            app.restart_delay,
            config.isolated,
            config.timings,
        )
        self._slots = [
            WorkerSlot(
                lambda: children.spawn("worker"),
                lambda: children.has_spare,
                children.terminate,
                registry,
                app,
                shortest_run=config.timings.shortest_run,
                burst=config.burst,
                reloads=config.sources is not None,
            )
            for _ in range(config.processes)
        ]
        self._reload = anyio.Event()

    async def run(self, first: Child | None) -> int:
        """Keep all slots filled, until all children were drained; in a burst, until all tasks are done.

        Return the exit code.

        Args:
            first: A child that is ready already, for the first slot.
        """
        self._slots[0].child = first
        async with anyio.create_task_group() as background:
            background.start_soon(self._quarantine.run)
            background.start_soon(self._reload_on_request)
            if self._keeps_spare:
                background.start_soon(self._children.keep_spare)
            await self._run_slots(self._slots)
            ended = 0
            while self._burst and self._quarantine.ended > ended and not self._registry.state.paused:
                # What a quarantine child left behind (a task after a crash, or for a retry) needs an ordinary child.
                ended = self._quarantine.ended
                await self._run_slots(self._slots[:1])
            background.cancel_scope.cancel()
        return 1 if self._registry.state.paused else 0

    async def _run_slots(self, slots: Sequence[WorkerSlot]) -> None:
        """Keep slots filled, until their children were drained, or have found nothing more in a burst.

        Then wait until no quarantined task runs.
        """
        async with anyio.create_task_group() as running:
            for slot in slots:
                running.start_soon(slot.run)
        while not self._quarantine.idle or (self._quarantine.unmet and not self._registry.state.paused):
            if self._quarantine.idle:
                self._quarantine.scale_up(1)  # the last start failed; the next one comes after its delay
            await anyio.sleep(self._burst_poll)

    def on_message(self, child: Child, kind: str) -> None:
        if kind in ("begins", "survived", "ends", "idle"):
            self._quarantine.on_message(child, kind)
        elif kind == "suspects":
            self._quarantine.scale_up(1)

    def on_exit(self, child: Child) -> None:
        if child.role == "isolated":
            self._quarantine.on_exit(child)

    async def replace(self, child: Child) -> None:
        """Replace a child that reports that it is no longer fit for work."""
        if child.stop_requests:
            return
        logger.warning("worker {} requested its replacement", child.worker)
        if child.role == "isolated":
            self._children.terminate(child)
        for slot in self._slots:
            if slot.child is child and not await slot.replace(child) and not child.stop_requests:
                logger.error("replacement for worker {} failed to start; keeping it", child.worker)

    def reload(self) -> None:
        """Replace all children, one at a time. A request during a reload starts another one after it."""
        self._reload.set()

    async def _reload_on_request(self) -> None:
        while True:
            await self._reload.wait()
            self._reload = anyio.Event()
            logger.info("reload started: replacing all workers, one at a time")
            self._service.reloading()
            if await self._replace_all():
                logger.info("reload finished: all workers replaced")
            else:
                logger.error("reload stopped: a new worker failed to start (see above); keeping the remaining workers")
            self._service.ready()

    async def _replace_all(self) -> bool:
        self._children.discard_spare()
        for slot in self._slots:
            if not await slot.replace():
                return False
        self._quarantine.retire_all()
        return True
