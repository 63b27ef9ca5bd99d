"""The children that there are to be: a post for each ordinary one, the ward of the isolated ones, and their renewal.

One place for an ordinary child, which is kept filled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from ..log import logger
from .child import Child
from .children import Children
from .config import AppInfo, SupervisorConfig
from .crash_counter import SupervisorRegistry
from .quarantine_pool import QuarantinePool

__all__ = ["WorkerPool", "WorkerSlot"]

_HASTY: Final = 1.0
"""Seconds that a child lives that is worth its start; one that ends sooner, though cleanly, is not replaced at once."""


class WorkerSlot:
    """Has a child started, waits for its end, and has another one started: after a crash with a delay, while the
    supervisor is paused not at all.
    """

    def __init__(
        self,
        hire: Callable[[], Awaitable[Child | None]],
        retire: Callable[[Child], None],
        ledger: SupervisorRegistry,
        facts: AppInfo,
        *,
        burst: bool,
    ) -> None:
        """hire: starts a child; returns it when it works, None where it ended before. retire: has one stop. burst: a
        child that ended cleanly is not replaced.
        """
        self.child: Child | None = None
        self._hire = hire
        self._retire = retire
        self._ledger = ledger
        self._facts = facts
        self._burst = burst
        self._filling = anyio.Lock()
        self._failures = 0

    async def keep(self) -> None:
        """Keep it filled; with `burst`, until a child has come to its end, or a pause begins."""
        delay = 0.0
        while True:
            if self.child is None:
                if self._burst and self._ledger.standing.paused:
                    return
                await self._bide(delay)
                delay = await self._fill()
                continue
            child = self.child
            await child.settled.wait()
            if self.child is not child:
                continue  # it was replaced
            self.child = None
            if self._burst and not child.crashed:
                return
            delay = self._delay_after(child)

    async def renew(self, unfit: Child | None = None) -> bool:
        """Have another child take the place of the one that is there, once it works; False where it does not come up,
        and the old one goes on. unfit: only if it is this one still.
        """
        async with self._filling:
            old = self.child
            if old is None or old.stops or unfit not in (None, old):
                return True  # who is there, or comes next, is a new one anyway
            new = await self._hire()
            if new is None:
                return False
            self.child = new
        self._retire(old)
        await old.settled.wait()
        return True

    async def _bide(self, delay: float) -> None:
        with anyio.move_on_after(delay):
            await self._ledger.wait_resumed()
        await self._ledger.wait_unpaused()

    async def _fill(self) -> float:
        """Have a child started; returns after how many seconds to try again where it did not come up."""
        async with self._filling:
            if self.child is not None:
                return 0.0
            self.child = await self._hire()
        if self.child is not None:
            self._failures = 0
            return 0.0
        self._failures += 1
        delay = self._facts.delay(self._failures)
        logger.error("a worker did not start (its own message is above); it is tried again in {:g} s", delay)
        return delay

    def _delay_after(self, child: Child) -> float:
        if not child.crashed:
            return 0.0 if time.monotonic() - child.began > _HASTY else _HASTY
        delay = self._facts.delay(child.crashes)
        if not self._ledger.standing.paused:
            logger.warning(
                "crash {} within {:g} s: another worker is started in {:g} s",
                child.crashes,
                self._facts.crash_window,
                delay,
            )
        return delay


_BURST_LOOK: Final = 0.2
"""Seconds between looks whether a burst has come to its end."""


class WorkerPool:
    """Keeps all places filled, and hears what children say that concerns the others."""

    def __init__(self, plan: SupervisorConfig, facts: AppInfo, ledger: SupervisorRegistry, children: Children) -> None:
        self._ledger = ledger
        self._children = children
        self._ward = QuarantinePool(lambda: children.spawn("isolated"), children.terminate, facts, plan.isolated)
        self._posts = [
            WorkerSlot(lambda: children.spawn("worker"), children.terminate, ledger, facts, burst=plan.burst)
            for _ in range(plan.processes)
        ]
        self._reload = anyio.Event()

    async def run(self, first: Child | None) -> int:
        """Keep all places filled; with a burst, until all is done. Returns the exit code. first: a child that works."""
        self._posts[0].child = first
        async with anyio.create_task_group() as background:
            background.start_soon(self._ward.keep)
            background.start_soon(self._reload_when_told)
            async with anyio.create_task_group() as posts:
                for post in self._posts:
                    posts.start_soon(post.keep)
            while not self._ward.quiet:  # noqa: ASYNC110 - suspects of a burst are run to their end
                await anyio.sleep(_BURST_LOOK)
            background.cancel_scope.cancel()
        return 1 if self._ledger.standing.paused else 0

    def hear(self, child: Child, what: str) -> None:
        """A word of a child."""
        if what in ("begins", "ends", "idle"):
            self._ward.hear(child, what)
        elif what == "suspects":
            self.scale_up(1)

    def on_exit(self, child: Child) -> None:
        """A child has ended."""
        if child.role == "isolated":
            self._ward.on_exit(child)

    def scale_up(self, suspects: int) -> None:
        """There are so many tasks that must run alone."""
        self._ward.scale_up(suspects)

    async def replace(self, child: Child) -> None:
        """A child says that it is no longer fit for work."""
        if child.stops:
            return
        logger.warning("worker {} asks to be replaced", child.worker)
        if child.role == "isolated":
            self._children.terminate(child)
        for post in self._posts:
            if post.child is child and not await post.renew(child) and not child.stops:
                logger.error("worker {} stays as it is: another one did not start", child.worker)

    def reload(self) -> None:
        """Replace all children by new ones. Said while that goes on, it is done once more."""
        self._reload.set()

    async def _reload_when_told(self) -> None:
        while True:
            await self._reload.wait()
            self._reload = anyio.Event()
            logger.info("SIGHUP: replacing all workers, one at a time")
            if await self._renew_all():
                logger.info("all workers are replaced")
            else:
                logger.error("the reload has ended early: a new worker did not start (see above); the old ones go on")

    async def _renew_all(self) -> bool:
        for post in self._posts:
            if not await post.renew():
                return False
        return await self._ward.renew()
