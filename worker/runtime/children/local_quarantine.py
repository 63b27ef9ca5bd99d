"""Quarantine children of a worker that has no supervisor: the worker's own process starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from anyio.abc import TaskGroup

from ....queues import Gateway, Namespace, report_crash
from ...app import App
from ...log import logger
from ..supervisor_link import Role
from .app_command import ChildCommand, app_command, app_digest
from .child import Child
from .processes import Children
from .quarantine_pool import QuarantinePool, most_children
from .stall_monitor import StallMonitor
from .timings import SupervisorTimings, delay_after

__all__ = ["LocalQuarantine"]


class LocalQuarantine:
    """Link of a worker to its own quarantine pool, which starts with the first suspect.

    If a child cannot run the tasks of the worker's app, the worker is asked to run suspects itself: the worker has no
    import path, the import failed, or what was imported has other tasks or settings.

    Args:
        app: The app of the worker.
        command: Command of a child. None: the worker runs suspects itself.
        most: Greatest number of children; None for one per slot of the worker, within limits.
    """

    role: Role = "worker"
    reports = True

    def __init__(self, app: App, command: ChildCommand | None, most: int | None = None) -> None:
        self._app = app
        self._command = command
        self._most = most
        self._timings = SupervisorTimings()
        self._queues: Sequence[str] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._children: Children | None = None
        self._pool: QuarantinePool | None = None
        self._proven = self._failed = False

    @classmethod
    def of(cls, app: App, import_path: str | None, queues: Sequence[str], name: str | None) -> Self:
        """Return the pool of a worker in a user's program. See `app_command` for the arguments and the error."""
        return cls(app, None if import_path is None else app_command(import_path, queues, name))

    def send(self, what: str, **more: Any) -> None:
        """Start a quarantine child if the worker leaves a suspect to it. May be called from any thread."""
        if what == "suspects" and self._loop is not None:
            self._loop.call_soon_threadsafe(self._scale_up)

    def stop(self, requests: int = 1) -> None:
        """Stop all children gracefully; with the second request, at once."""
        for child in list(self._children or ()) * requests:
            child.stop()

    @property
    def starts_processes(self) -> bool:
        """Whether children can be started, as far as is known."""
        return self._command is not None and not self._failed

    @property
    def idle(self) -> bool:
        """Whether no quarantined task runs in a child or is about to."""
        return self._pool is None or self._failed or self._pool.idle

    def open(
        self,
        background: TaskGroup,
        gateway: Gateway,
        queues: Sequence[str],
        slots: int,
        on_failed: Callable[[], None],
    ) -> None:
        """Start children on request from now on.

        Args:
            background: Outlives all children: `close` comes first.
            queues: Queues of the worker.
            slots: Number of tasks that the worker runs at once.
            on_failed: Called once if children cannot run the tasks of the app.
        """
        self._background, self._gateway, self._queues = background, gateway, queues
        self._places = self._most or most_children(slots)
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Start no more children, and return when all have exited."""
        self._loop = None
        if self._children is not None:
            self._children.close()
            for child in self._children:
                self._children.terminate(child)
            for child in self._children:
                await child.handled.wait()

    def _scale_up(self) -> None:
        if self._failed or self._loop is None:
            return
        if self._pool is None:
            if self._command is None:
                self._fail("the worker has no import_path")
                return
            self._pool = self._open_pool(self._command)
        self._pool.scale_up(1)

    def _open_pool(self, command: ChildCommand) -> QuarantinePool:
        settings, timings = self._app.settings, self._timings
        children = self._children = Children(
            command, timings, self._background, on_message=self._on_message, on_exit=self._on_exit
        )
        children.set_grace(settings.grace)
        pool = QuarantinePool(
            lambda: children.spawn("isolated"),
            children.terminate,
            lambda failures: delay_after(failures, settings.restart_delays),
            self._places,
            timings,
        )
        self._background.start_soon(pool.run)
        self._background.start_soon(StallMonitor(children, settings.stall_limit, timings).run)
        return pool

    def _fail(self, why: str) -> None:
        """Let the worker itself run suspects from now on."""
        self._failed = True
        logger.warning(
            "could not run quarantined tasks of app {!r} in processes of their own: {}. They run one at a time in this "
            "worker, which takes no other task meanwhile. Use 'perdure worker run', or Worker(app, "
            "import_path='module:attribute')",
            self._app.name,
            why,
        )
        for child in self._children or ():
            child.stop()
        self._on_failed()

    def _on_message(self, child: Child, kind: str) -> None:
        if self._pool is None or self._failed:
            return
        if kind == "loaded":
            self._proven = child.app_info.get("digest") == app_digest(self._app)
            if self._proven:
                child.start_work()
            else:
                self._fail("their process imported an app with other tasks or settings")
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
                Namespace(self._app.settings.namespace),
                self._queues,
                child.worker,
                exit_status=child.exit_status,
                steps=child.steps,
            )
        elif not self._proven and not self._failed and not child.stop_requests:
            self._fail(f"the first process ended by {child.exit_status} before it was ready; its log has the cause")
