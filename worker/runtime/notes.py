"""Noting, once in a while, that long steps live."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import anyio

from ...queues import LeaseLost, QueueError, note_alive
from ..durable import Ending, Run
from ..observe import logger

__all__ = ["Notes"]


class Notes:
    """Writes a note for every step that has been running for an interval or more."""

    def __init__(self, runs: Callable[[], Collection[Run]], interval: float) -> None:
        self._runs = runs
        self._interval = interval

    async def run(self) -> None:
        while True:
            await anyio.sleep(self._interval / 2)
            for run in list(self._runs()):
                await self._note(run)

    async def _note(self, run: Run) -> None:
        now = time.monotonic()
        for key, began in list(run.steps_in_flight.items()):
            if now - began >= self._interval / 2:
                try:
                    await note_alive(run.gateway, run.delivery, run.id, key)
                except LeaseLost:
                    run.end(Ending.LOST)
                except QueueError as error:
                    logger.debug("cannot note that step {} lives: {}", key, error)
