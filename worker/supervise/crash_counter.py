"""A supervisor's entry in Redis: its registration, its crash count, and its pause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import anyio

from ...queues.delivery.quarantine_store import CrashReport, report_crash
from ...queues.errors import QueueError
from ...queues.runtime import RUNTIME
from ...queues.supervisors import (
    ChildInfo,
    SupervisorInfo,
    SupervisorState,
    count_crash,
    resume_supervisor,
    supervise,
    withdraw_supervisor,
)
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ..log import logger
from ..runtime.children.child import Child, SupervisorTimings
from .config import AppInfo


class SupervisorRegistry:
    """Registers the supervisor, counts crashes of its children, and follows its pause.

    Args:
        name: First part of the supervisor's name; default: the app's name.
        children: Returns the current children.
        on_paused: Called when a pause begins, with the fields of the alert.
    """

    def __init__(
        self,
        app: AppInfo,
        name: str | None,
        processes: int,
        children: Callable[[], Iterable[ChildInfo]],
        on_paused: Callable[[Mapping[str, Any]], None],
        timings: SupervisorTimings,
    ) -> None:
        host = RUNTIME.host()
        self.name = f"{name or app.app}-{host}"
        self.state = SupervisorState(0, 0, "")
        self._app = app
        self._gateway = Gateway(app.address, requirements=None)  # its workers check the server
        self._children = children
        self._on_paused = on_paused
        self._timings = timings
        self._resumed = anyio.Event()
        self._closed = False
        self._info = SupervisorInfo(
            id=f"{self.name}-{RUNTIME.pid()}-{RUNTIME.token(3)}",  # in a container, name and pid may recur
            name=self.name,
            app=app.app,
            host=host,
            pid=RUNTIME.pid(),
            version=version("perdure"),
            processes=processes,
            window=app.crash_window,
        )

    async def open(self) -> None:
        """Connect and register; read whether the supervisor is paused.

        Raises:
            QueueError: Redis cannot be reached, or refused.
        """
        await self._gateway.open()
        self.state = await self._register()
        if self.state.paused:
            self._log_pause()

    async def close(self) -> None:
        """Deregister and disconnect. If Redis does not answer in time, the registration expires."""
        self._closed = True
        with anyio.move_on_after(self._timings.last_reply) as limit:
            try:
                await withdraw_supervisor(self._gateway, self._app.namespace, self._info.id)
            except QueueError as error:
                logger.debug("could not deregister the supervisor: {}", error)
        if limit.cancelled_caught:
            logger.debug("could not deregister the supervisor: Redis does not answer")
        await self._gateway.close()

    async def run(self) -> None:
        """Renew the registration periodically."""
        while True:
            await anyio.sleep(self._timings.register_interval)
            if self._closed:
                return
            try:
                self._update(await self._register())
            except QueueError as error:
                logger.debug("could not renew the registration of the supervisor: {}", error)

    async def wait_unpaused(self) -> None:
        """Wait while the supervisor is paused."""
        while self.state.paused:
            await self._resumed.wait()

    async def wait_resumed(self) -> None:
        """Wait until the next time that a pause is lifted, or the code has changed."""
        await self._resumed.wait()

    async def resume(self) -> None:
        """Lift a pause, forget the crashes, and end the delays before restarts: the code has changed."""
        try:
            await resume_supervisor(self._gateway, self._app.namespace, self.name)
            self._update(await self._register())
        except QueueError as error:
            logger.debug("could not forget the crashes of the supervisor: {}", error)
        self._wake()

    def _wake(self) -> None:
        self._resumed.set()
        self._resumed = anyio.Event()

    async def report(self, child: Child) -> CrashReport:
        """Make the deliveries of a dead child claimable at once. Retries while Redis is unavailable."""
        return await report_crash(
            self._gateway,
            self._app.namespace,
            child.queues,
            child.worker,
            exit_status=child.exit_status,
            steps=child.steps,
        )

    async def count(self, child: Child) -> int:
        """Count the crash of an ordinary child; return the crashes within the window. Retries as `report` does."""
        worker = child.worker or f"pid-{child.pid}-{child.started_at:.0f}"
        state = await retry_while_unavailable(
            lambda: count_crash(
                self._gateway,
                self._app.namespace,
                self.name,
                worker,
                why=f"worker {worker} ended by {child.exit_status}",
                threshold=self._app.crash_threshold,
                window=self._app.crash_window,
            ),
            on_wait=lambda error: logger.debug("could not count a crash: {}; trying again", error),
        )
        self._update(state)
        return state.crashes

    async def _register(self) -> SupervisorState:
        info = replace(self._info, children=tuple(self._children()))
        return await supervise(self._gateway, self._app.namespace, info, self._timings.registration_ttl)

    def _update(self, state: SupervisorState) -> None:
        before, self.state = self.state, state
        if state.paused and not before.paused:
            self._log_pause()
            event: dict[str, Any] = {
                "event": "paused",
                "supervisor": self.name,
                "app": self._app.app,
                "host": self._info.host,
                "window": self._app.crash_window,
                "remedy": "find the cause in the log and in 'perdure dlq list', then run: "
                f"perdure worker resume {self.name}",
            }
            self._on_paused(event | state._asdict())
        elif before.paused and not state.paused:
            logger.info("supervisor {} resumed", self.name)
            self._wake()

    def _log_pause(self) -> None:
        logger.error("{}", self.pause_reason)

    @property
    def pause_reason(self) -> str:
        """Why the supervisor is paused, and the remedy, in sentences; empty if it is not. Thread-safe."""
        state = self.state
        if not state.paused:
            return ""
        since = datetime.fromtimestamp(state.paused_since / 1000, UTC).isoformat(timespec="seconds")
        return (
            f"supervisor {self.name} paused at {since} after {state.crashes} crashes without progress within "
            f"{self._app.crash_window:g} s; the last one: {state.why}. Crashed workers are not replaced, the others "
            "keep running. Find the cause in the log and in 'perdure dlq list', then run: "
            f"perdure worker resume {self.name}"
        )
