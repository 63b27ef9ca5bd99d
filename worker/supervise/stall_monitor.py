"""Seeing that a child does not answer any more, and ending it.

How all children are, from what each says of itself every second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ..log import logger
from ..runtime.health import ALIVE, CONNECTED, Combined, Level, Report
from .child import Child

__all__ = ["StallMonitor", "health_of"]

_INTERVAL: Final = 1.0
"""Seconds between looks, and between two signs of life of a healthy child."""

_OWN_PAUSE: Final = 5.0
"""A look that comes so many seconds late means that this process stood still itself."""


class StallMonitor:
    """Looks at all children. A healthy one says every second for how long its event loop has not answered; one whose
    loop does not answer for longer than the limit, or that is silent for so long (its interpreter is stuck in C code),
    is dumped and killed. One that was told to stop has a time limit of its own.
    """

    def __init__(self, children: Iterable[Child], limit: float) -> None:
        """limit: seconds."""
        self._children = children
        self._limit = limit

    async def run(self) -> None:
        async with anyio.create_task_group() as ending:
            last = time.monotonic()
            while True:
                await anyio.sleep(min(_INTERVAL, self._limit / 4))
                now = time.monotonic()
                if now - last > _OWN_PAUSE:
                    self._forgive(now)
                last = now
                for child in self._children:
                    self._look(child, now, ending)

    def _forgive(self, now: float) -> None:
        """This process was frozen, and perhaps the children with it: their silence says nothing."""
        for child in self._children:
            if child.heard is not None:
                child.heard = now

    def _look(self, child: Child, now: float, ending: TaskGroup) -> None:
        if child.heard is None or child.stalled or child.stops or child.gone.is_set():
            return
        silent = now - child.heard
        if max(child.lag, silent) <= self._limit:
            return
        what = "its event loop has not answered" if child.lag > self._limit else "it has not been heard of"
        logger.error(
            "worker {} (process {}) is stuck: {} for {:.0f} s; its stacks follow, then it is killed",
            child.worker,
            child.pid,
            what,
            max(child.lag, silent),
        )
        ending.start_soon(child.abort, "stalled")


_SILENT: Final = 5.0
"""Seconds without a word, of one every second, after which a child does not count as alive."""


def health_of(children: Iterable[Child]) -> Combined:
    """The children that are to work: not those that were told to stop. May be asked from any thread."""
    return Combined(_report(child) for child in children if not child.stops and not child.gone.is_set())


def _report(child: Child) -> Report:
    name = child.worker or f"process {child.pid}"
    if child.heard is None or not child.health:
        return Report(name, (Level(CONNECTED, False, "it is only starting"),))
    silent = time.monotonic() - child.heard
    if silent > _SILENT:
        remedy = "its interpreter is stuck; the supervisor replaces it after the stall limit"
        return Report(name, (Level(ALIVE, False, f"it has not been heard of for {silent:.0f} s", remedy),))
    try:
        return Report.of(child.health)
    except (KeyError, TypeError):
        return Report(name, (Level(ALIVE, True, "it tells no more"),))
