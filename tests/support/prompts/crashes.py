"""Crashes of a worker in the process of the test: it loses its lease before or after given writes of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from perdure import App, TaskHandle, Worker
from perdure.queues import Gateway
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import Script

from tests.support.workers import BOUND, FRESH, redis_command

When = Literal["before", "after"]


class Crashes:
    """A schedule of crashes by the number of the write, over all runs of a task.

    Writes that a worker still sends after its crash began are not counted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: App) -> None:
        self.app = app
        self.schedule: Mapping[int, When] = {}
        self.writes = self.happened = 0
        self._dying = False
        self._died = asyncio.Event()
        self._run = Gateway.run

        async def run(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if script.name != "write_checkpoint" or self._dying:
                return await self._run(gateway, script, keys, args)
            self.writes += 1
            when = self.schedule.get(self.writes)
            if when is None:
                return await self._run(gateway, script, keys, args)
            self._dying = True
            if when == "after":
                await self._run(gateway, script, keys, args)
            self.happened += 1
            try:
                await redis_command(app, "XCLAIM", keys[0], GROUP, "dead", 0, args[2], "IDLE", FRESH, "JUSTID")
            finally:  # the heartbeat may cancel the handler as soon as the command is executed
                self._died.set()
            return await self._run(gateway, script, keys, args)

        monkeypatch.setattr(Gateway, "run", run)

    async def play(self, handle: TaskHandle[Any], schedule: Mapping[int, When]) -> Any:
        """Run a task to its result, with another worker after each crash."""
        self.schedule, self.writes, self.happened = schedule, 0, 0
        done = asyncio.create_task(handle.result(timeout=BOUND * 2))
        while not done.done():
            self._dying = False
            self._died.clear()
            async with Worker(self.app) as worker:
                running = asyncio.create_task(worker.run())
                died = asyncio.create_task(self._died.wait())
                await asyncio.wait([died, done], return_when=asyncio.FIRST_COMPLETED)
                died.cancel()
                worker.stop()
                worker.stop()
                await asyncio.wait_for(running, BOUND)
        return await done
