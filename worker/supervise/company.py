"""The children that there are to be: a post for each ordinary one, the ward of the isolated ones, and their renewal."""

from __future__ import annotations

from typing import Final

import anyio

from ..observe import logger
from .child import Child
from .children import Children
from .ledger import Ledger
from .plan import Facts, Plan
from .post import Post
from .ward import Ward

__all__ = ["Company"]

_BURST_LOOK: Final = 0.2
"""Seconds between looks whether a burst has come to its end."""


class Company:
    """Keeps all places filled, and hears what children say that concerns the others."""

    def __init__(self, plan: Plan, facts: Facts, ledger: Ledger, children: Children) -> None:
        self._ledger = ledger
        self._children = children
        self._ward = Ward(lambda: children.hire("isolated"), children.retire, facts, plan.isolated)
        self._posts = [
            Post(lambda: children.hire("worker"), children.retire, ledger, facts, burst=plan.burst)
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
            self.wake(1)

    def lose(self, child: Child) -> None:
        """A child has ended."""
        if child.role == "isolated":
            self._ward.lose(child)

    def wake(self, suspects: int) -> None:
        """There are so many tasks that must run alone."""
        self._ward.wake(suspects)

    async def replace(self, child: Child) -> None:
        """A child says that it is no longer fit for work."""
        if child.stops:
            return
        logger.warning("worker {} asks to be replaced", child.worker)
        if child.role == "isolated":
            self._children.retire(child)
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
