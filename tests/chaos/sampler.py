"""Samples of a long run: memory of the server, and of workers that no fault hits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import psutil
from perdure import Producer
from perdure.queues import QueueError

from .fleet import ManagedProcess
from .journal import JournalWriter

__all__ = ["Sampler"]

_INTERVAL: Final = 5.0


class Sampler:
    """Writes samples into the journal."""

    def __init__(self, producer: Producer, spared: Sequence[ManagedProcess], journal: JournalWriter) -> None:
        self._producer = producer
        self._spared = spared
        self._journal = journal

    async def run(self) -> None:
        """Sample until cancelled. While Redis is away, there is no sample."""
        while True:
            try:
                self._journal.write("sample", **await self._server(), workers=await asyncio.to_thread(self._workers))
            except QueueError as error:
                self._journal.write("blind", error=str(error)[:200])
            await asyncio.sleep(_INTERVAL)

    async def _server(self) -> dict[str, int]:
        gateway = self._producer.gateway
        info, keys = await gateway.pipeline([("INFO", "memory"), ("DBSIZE",)])
        found = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        return {"memory": int(found["used_memory"]), "keys": keys}

    def _workers(self) -> dict[str, list[float]]:
        """Return age in seconds and resident bytes of each child of a spared supervisor, by process id."""
        found = dict[str, list[float]]()
        for host in self._spared:
            for pid in host.pids()[1:]:
                try:
                    process = psutil.Process(pid)
                    found[str(pid)] = [time.time() - process.create_time(), float(process.memory_info().rss)]
                except psutil.Error:
                    continue
        return found
