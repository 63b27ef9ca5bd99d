"""Where the supervisor stands in Redis: it announces itself, has crashes counted, and hears of pause and resumption."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

import anyio

from ...queues import (
    ChildInfo,
    CrashReport,
    Gateway,
    QueueError,
    SupervisorInfo,
    SupervisorState,
    count_crash,
    report_crash,
    retry_while_unavailable,
    supervise,
    withdraw_supervisor,
)
from ..log import logger
from .child import Child
from .config import AppInfo

__all__ = ["SupervisorRegistry"]

_INTERVAL: Final = 1.5
"""Seconds between announcements, and so until a resumption takes effect."""

_TTL: Final = 15.0
"""Seconds after which a silent supervisor counts as gone."""


class SupervisorRegistry:
    """What Redis knows of this supervisor, and what it tells it."""

    def __init__(
        self,
        facts: AppInfo,
        name: str | None,
        processes: int,
        children: Callable[[], Iterable[ChildInfo]],
        on_paused: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """name: begins the supervisor's name, else the app's. on_paused: called when a pause begins, with what there is
        to tell about it.
        """
        host = socket.gethostname()
        self.name = f"{name or facts.app}-{host}"
        self.standing = SupervisorState(0, 0, "")
        self._facts = facts
        self._gateway = Gateway(facts.address)
        self._children = children
        self._on_paused = on_paused
        self._resumed = anyio.Event()
        self._left = False
        self._info = SupervisorInfo(
            id=f"{self.name}-{os.getpid()}",
            name=self.name,
            app=facts.app,
            host=host,
            pid=os.getpid(),
            version=version("perdure"),
            processes=processes,
            window=facts.crash_window,
        )

    async def open(self) -> None:
        """Connect, and learn whether a pause is in force. `QueueError` where Redis cannot be reached or says no."""
        await self._gateway.open()
        self.standing = await self._announce()
        if self.standing.paused:
            self._log_pause()

    async def close(self) -> None:
        """Take leave."""
        self._left = True
        try:
            await withdraw_supervisor(self._gateway, self._facts.namespace, self._info.id)
        except QueueError as error:
            logger.debug("cannot take leave of Redis: {}", error)
        await self._gateway.close()

    async def run(self) -> None:
        """Announce the supervisor, again and again."""
        while True:
            await anyio.sleep(_INTERVAL)
            if self._left:
                return
            try:
                self._learn(await self._announce())
            except QueueError as error:
                logger.debug("cannot announce the supervisor: {}", error)

    async def wait_unpaused(self) -> None:
        """Return when no pause is in force: at once, as a rule."""
        while self.standing.paused:
            await self._resumed.wait()

    async def wait_resumed(self) -> None:
        """Return when a pause is lifted the next time."""
        await self._resumed.wait()

    async def report(self, child: Child) -> CrashReport:
        """Make what a dead child held claimable at once; returns when that is done, however long Redis is away."""
        return await report_crash(
            self._gateway, self._facts.namespace, child.queues, child.worker, exit_status=child.how, steps=child.doing
        )

    async def count(self, child: Child) -> int:
        """Count the crash of an ordinary child; returns how many there were within the window."""
        identity = child.worker or f"pid-{child.pid}-{child.began:.0f}"
        standing: SupervisorState = await retry_while_unavailable(
            lambda: count_crash(
                self._gateway,
                self._facts.namespace,
                self.name,
                identity,
                why=f"worker {identity} ended by {child.how}",
                threshold=self._facts.crash_threshold,
                window=self._facts.crash_window,
            ),
            on_wait=lambda error: logger.debug("could not count a crash: {}; trying again", error),
        )
        self._learn(standing)
        return standing.crashes

    async def _announce(self) -> SupervisorState:
        told = replace(self._info, children=tuple(self._children()))
        return await supervise(self._gateway, self._facts.namespace, told, _TTL)

    def _learn(self, standing: SupervisorState) -> None:
        before, self.standing = self.standing, standing
        if standing.paused and not before.paused:
            self._log_pause()
            about: dict[str, Any] = {
                "event": "paused",
                "supervisor": self.name,
                "app": self._facts.app,
                "host": self._info.host,
            }
            about |= {"window": self._facts.crash_window, "remedy": f"perdure worker resume {self.name}"}
            self._on_paused(about | standing._asdict())
        elif before.paused and not standing.paused:
            logger.info("supervisor {} goes on: its pause was lifted", self.name)
            self._resumed.set()
            self._resumed = anyio.Event()

    def _log_pause(self) -> None:
        logger.error(
            "supervisor {} is paused: {} crashes within {:g} s, at last {}. What crashed is not started again, what "
            "lives goes on. Find the cause in the log and in 'perdure dlq list', then: perdure worker resume {}",
            self.name,
            self.standing.crashes,
            self._facts.crash_window,
            self.standing.why,
            self.name,
        )
