"""What is stored while a step is under way: its progress once in a while, and a snapshot when one is due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from ...queues import Entry, Kind, LeaseLost, PayloadTooLarge, check_size
from ..durable import RunObserver
from ..journal import PlanStep
from ..log import logger
from .background import in_background
from .live_state import LiveState

__all__ = ["Autosave", "snapshots"]


class Autosave(RunObserver):
    """Saves the progress of one step. What an earlier run saved of it is there to begin with."""

    def __init__(self, session: LiveState[Any], step: PlanStep, every: float) -> None:
        """every: seconds between two saves."""
        self._run = session.run
        self._session = session
        self._step = step
        self._every = every
        self._saved = self._run.history.saved.get(step.key, b"{}")
        step.progress.clear()
        step.progress.update(orjson.loads(self._saved))

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Save for as long as the block runs."""
        self._run.observe(self)
        try:
            async with in_background(self._save_at_times()):
                yield
        finally:
            self._run.unobserve(self)

    async def on_checkpoint(self) -> None:
        """Save the step's progress, where it has changed. Raises `PayloadTooLarge`, `LeaseLost`, `TypeError`."""
        data = orjson.dumps(self._step.progress)
        if data == self._saved:
            return
        check_size(f"the progress of step {self._step.key!r}", len(data), self._run.payload_limit)
        await self._run.recorder.put(Entry(Kind.SAVED, self._step.key, data), wait=True)
        self._saved = self._run.history.saved[self._step.key] = data
        self._run.touch()

    async def _save_at_times(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.on_checkpoint()
            except LeaseLost:
                return  # the run has been told
            except (PayloadTooLarge, TypeError) as error:
                logger.bind(id=self._run.id).warning(
                    "the progress of step {} cannot be saved: {}", self._step.key, error
                )


@asynccontextmanager
async def snapshots(session: LiveState[Any]) -> AsyncIterator[None]:
    """Store a snapshot whenever one is due, for as long as the block runs."""
    async with in_background(_snapshot_when_due(session)):
        yield


async def _snapshot_when_due(session: LiveState[Any]) -> None:
    while True:
        await session.wanted.wait()
        if entries := session.snapshot():
            await session.run.recorder.put(*entries, wait=False)
