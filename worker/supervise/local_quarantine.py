"""Quarantine children of a worker that has no supervisor: the worker's own process starts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

from ...queues import Gateway, Namespace, report_crash
from ..log import logger
from ..runtime.supervisor_link import Role
from ..settings import Settings
from .child import Child
from .children import Children
from .config import SupervisorConfig, delay_after
from .quarantine_pool import QuarantinePool
from .stall_monitor import StallMonitor

__all__ = ["LocalQuarantine"]


class LocalQuarantine:
    """Link of a worker to its own quarantine pool.

    Args:
        config: Command line of a child, and the greatest number of children.
    """

    role: Role = "worker"

    def __init__(self, config: SupervisorConfig, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._queues: Sequence[str] = ()
        self._gateway = Gateway(settings.address, requirements=None)  # its worker checks the server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._children: Children | None = None
        self._pool: QuarantinePool | None = None

    def say(self, what: str, **more: Any) -> None:
        """Start a quarantine child if the worker leaves a suspect to it. May be called from any thread."""
        if what == "suspects" and self._loop is not None:
            self._loop.call_soon_threadsafe(self._scale_up)

    def stop(self) -> None:
        """Stop all children gracefully; the second time, at once."""
        for child in self._children or ():
            child.stop()

    async def wait_idle(self) -> None:
        """Wait until no quarantined task runs here or is about to."""
        while self._pool is not None and not self._pool.idle:  # noqa: ASYNC110 - state of several children
            await anyio.sleep(self._config.timings.burst_poll)

    @asynccontextmanager
    async def running(self, queues: Sequence[str]) -> AsyncIterator[None]:
        """Start children on request within the block. At its end, all children have exited.

        Args:
            queues: Queues of the worker.
        """
        self._loop = asyncio.get_running_loop()
        self._queues = queues
        timings, delays = self._config.timings, self._settings.restart_delays
        async with AsyncExitStack() as stack:
            await self._gateway.open()
            stack.push_async_callback(self._gateway.close)
            background = await stack.enter_async_context(anyio.create_task_group())
            children = self._children = Children(
                self._config, background, on_message=self._on_message, on_exit=self._on_exit
            )
            children.set_grace(self._settings.grace)
            self._pool = QuarantinePool(
                lambda: children.spawn("isolated"),
                children.terminate,
                lambda failures: delay_after(failures, delays),
                self._config.isolated,
                timings,
            )
            background.start_soon(self._pool.run)
            background.start_soon(StallMonitor(children, self._settings.stall_limit, timings).run)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    children.close()
                    for child in children:
                        children.terminate(child)
                    for child in children:
                        await child.handled.wait()
                background.cancel_scope.cancel()

    def _scale_up(self) -> None:
        if self._pool is not None:
            self._pool.scale_up(1)

    def _on_message(self, child: Child, kind: str) -> None:
        if self._pool is None:
            return
        if kind == "loaded":
            child.start_work()
        elif kind in ("begins", "survived", "ends", "idle"):
            self._pool.on_message(child, kind)
        elif kind == "suspects":
            self._pool.scale_up(1)

    async def _on_exit(self, child: Child) -> None:
        """Report the crash of a child, so that its task is claimed at once."""
        if self._pool is not None:
            self._pool.on_exit(child)
        if not child.crashed:
            return
        child.kill_group()
        if child.ready.is_set():
            logger.warning("quarantine worker {} (process {}) ended by {}", child.worker, child.pid, child.exit_status)
            await report_crash(
                self._gateway,
                Namespace(self._settings.namespace),
                self._queues,
                child.worker,
                exit_status=child.exit_status,
                steps=child.steps,
            )
