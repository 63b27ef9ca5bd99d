"""All children of the supervisor: how they are started, and what follows when one ends."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ...queues import ChildInfo, QueueError
from ..log import logger
from ..runtime.supervisor_link import Role
from .child import Child, OnSaid

__all__ = ["Children"]

_START_LIMIT: Final = 600.0
"""Seconds after which a child that neither works nor ends is given up; before, importing an app may take its time."""


_LEAVING: Final = 10.0
"""Seconds that a child has beyond its grace to give back what it holds and leave."""


class Children:
    """The processes that there are. Each is tended from its first moment until everything is done that follows from its
    end, whatever becomes of the one who asked for it.
    """

    def __init__(
        self,
        commands: Mapping[Role, Sequence[str]],
        tending: TaskGroup,
        *,
        on_said: OnSaid,
        on_end: Callable[[Child], Awaitable[None]],
    ) -> None:
        """tending: lives as long as any child. on_end: deals with the end of a child; may take as long as it must."""
        self._commands = commands
        self._tending = tending
        self._on_said = on_said
        self._on_end = on_end
        self._there: list[Child] = []
        self._shut = False
        self.patience = _LEAVING
        """Seconds that a child has to end when it is told to."""
        self._starting = anyio.Semaphore(max(1, os.cpu_count() or 1))

    def __iter__(self) -> Iterator[Child]:
        """Those whose end is not dealt with yet."""
        return iter(list(self._there))

    def grant(self, grace: float) -> None:
        """Let children have so many seconds for their running steps, before they must leave."""
        self.patience = grace + _LEAVING

    def shut(self) -> None:
        """From now on nobody is hired any more."""
        self._shut = True

    def infos(self) -> Iterator[ChildInfo]:
        return (child.info for child in self if not child.gone.is_set())

    async def begin(self, role: Role) -> Child:
        """Start a process. `OSError` where the machine has no room for it."""
        child = await Child.begin(role, self._commands[role], self._on_said)
        self._there.append(child)
        self._tending.start_soon(self._tend, child)
        return child

    async def spawn(self, role: Role) -> Child | None:
        """Start a child; returns it when it works, None where it ended before. No more at a time than there are
        processors.
        """
        async with self._starting:
            if self._shut:
                return None
            try:
                child = await self.begin(role)
            except OSError as error:
                logger.error("a process cannot be started: {}", error)
                return None
            up = False
            with anyio.move_on_after(_START_LIMIT) as limit:
                up = await child.come_up()
            if limit.cancelled_caught:
                logger.error("process {} has not begun to work for {:g} s: it is killed", child.pid, _START_LIMIT)
                child.kill()
            return child if up else None

    def terminate(self, child: Child) -> None:
        """Have a child stop; one that takes longer than it may is killed."""
        child.stop()
        self._tending.start_soon(self._see_off, child)

    async def _see_off(self, child: Child) -> None:
        with anyio.move_on_after(self.patience):
            await child.gone.wait()
        if not child.gone.is_set():
            logger.error("worker {} (process {}) did not end in time: it is killed", child.worker, child.pid)
            child.kill()

    async def _tend(self, child: Child) -> None:
        await child.wait()
        try:
            await self._on_end(child)
        except QueueError as error:
            logger.error(
                "the end of process {} cannot be reported: {}; what it held waits for its lease", child.pid, error
            )
        finally:
            self._there.remove(child)
            child.settled.set()
