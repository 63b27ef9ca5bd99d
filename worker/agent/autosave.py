"""Writes while a step runs: its progress at intervals, and snapshots of the state when they are due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.envelope import check_size
from ...queues.errors import EntriesLost, LeaseLost, PayloadTooLarge
from ...queues.json_form import as_json
from ..durable.observer import RunObserver
from ..journal.state import PlanStep
from ..log import logger
from .background import in_background
from .live_state import LiveState


class Autosave(RunObserver):
    """Saver of one step's progress, which starts with the progress that an earlier run saved."""

    def __init__(self, live: LiveState[Any], step: PlanStep, every: float) -> None:
        """Load the saved progress. `every` is the number of seconds between two saves."""
        self._run = live.run
        self._live = live
        self._step = step
        self._every = every
        self._saved = self._run.history.saved.get(step.key, b"{}")
        step.progress.clear()
        step.progress.update(orjson.loads(self._saved))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Save at intervals and at each checkpoint of the run during the block."""
        self._run.observe(self)
        try:
            async with in_background(self._save_periodically()):
                yield
        finally:
            self._run.unobserve(self)

    async def on_checkpoint(self) -> None:
        """Save the step's progress if it has changed. Raises `PayloadTooLarge`, `LeaseLost`, `ValueError`."""
        data = as_json(self._step.progress)
        if data == self._saved:
            return
        check_size(f"the progress of step {self._step.key!r}", len(data), self._run.payload_limit)
        await self._run.recorder.put(Entry(Kind.SAVED, self._step.key, data), wait=True, progress=True)
        self._saved = self._run.history.saved[self._step.key] = data
        self._run.touch()
        self._run.progressed()

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.on_checkpoint()
            except (LeaseLost, EntriesLost):
                return  # the run is cancelled
            except (PayloadTooLarge, ValueError) as error:
                logger.bind(id=self._run.id).warning(
                    "could not save the progress of step {}: {}", self._step.key, error
                )


@asynccontextmanager
async def snapshots(live: LiveState[Any]) -> AsyncIterator[None]:
    """Store snapshots when they are due, during the block."""
    async with in_background(_snapshot_when_due(live)):
        yield


async def _snapshot_when_due(live: LiveState[Any]) -> None:
    while True:
        await live.snapshot_due.wait()
        if entries := live.snapshot():
            await live.run.recorder.put(*entries, wait=False)
