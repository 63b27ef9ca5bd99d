"""Observer that reads tasks while the run continues, and writes to the journal what it sees.

It reads states through the public handle, and all places of a partition at one instant. It bypasses the proxies, so it
also logs when the server itself is slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson
from perdure import Producer, TaskHandle, TaskNotFound
from perdure.queues import QueueError

from tests.support.task_places import all_places

from .journal import JOURNAL_NAME, SECOND, JournalWriter

__all__ = ["Observer"]

_WATCHED: Final = 60
"""Tasks that are looked at in one round."""

_JUMP: Final = 5_000
"""Milliseconds by which the limits' clock may differ from that of Redis between two looks without a line."""

_SLOW: Final = 0.5
"""Seconds after which a reply of the server is logged as slow."""


class Observer:
    """Follows the journal for acknowledged tasks, and watches them also after they have ended."""

    def __init__(self, producer: Producer, folder: Path, journal: JournalWriter) -> None:
        self._producer = producer
        self._file = folder / JOURNAL_NAME
        self._read = 0
        self._journal = journal
        self._tasks: list[tuple[str, str, int]] = []
        self._seen: dict[str, str] = {}
        self._next = 0
        self._clock = (0, 0)

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await asyncio.sleep(0.2)
            await self._ping_server()
            self._follow()
            try:
                await self._watch_clock()
                await self._observe(self._window())
            except QueueError as error:
                self._journal.write("blind", error=str(error)[:200])
                await asyncio.sleep(0.3)

    async def _ping_server(self) -> None:
        asked = time.monotonic_ns()
        with suppress(QueueError):
            await self._producer.gateway.command("PING")
        if time.monotonic_ns() - asked > _SLOW * SECOND:
            self._journal.write("slow_server", since=asked)

    async def _watch_clock(self) -> None:
        """Log each jump of the limits' clock, by which tokens lapse: it goes with that of Redis, or stands still."""
        stored = (await self._producer.gateway.command("GET", self._producer.namespace.limits.clock)) or b"0 0"
        seen, virtual = (int(part) for part in stored.split()[:2])
        before, self._clock = self._clock, (seen, virtual)
        if before[1] and not -_JUMP <= virtual - before[1] - (seen - before[0]) <= _JUMP:
            self._journal.write("limits_clock", seen=[before[0], seen], virtual=[before[1], virtual])

    def _follow(self) -> None:
        with self._file.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        end = new.rfind(b"\n") + 1
        self._read += end
        for text in new[:end].splitlines():
            if b'"acknowledged"' in text:
                line = orjson.loads(text)
                if line["what"] == "acknowledged":
                    self._tasks.append((line["task"], line["queue"], line["partition"]))

    def _window(self) -> Sequence[tuple[str, str, int]]:
        """Return the latest tasks, and as many of all tasks in turn: an ended task must stay ended."""
        latest = self._tasks[-_WATCHED // 2 :]
        self._next = 0 if self._next >= len(self._tasks) else self._next
        turn = self._tasks[self._next : self._next + _WATCHED // 2]
        self._next += len(turn)
        return list(dict.fromkeys([*latest, *turn]))

    async def _observe(self, window: Sequence[tuple[str, str, int]]) -> None:
        handles = [self._handle(*one) for one in window]
        asked = time.monotonic_ns()
        for handle, state in zip(handles, await asyncio.gather(*map(_state, handles)), strict=True):
            if self._seen.get(handle.id) != state:
                self._seen[handle.id] = state
                self._journal.write("seen", task=handle.id, state=state, since=asked)
        await self._check_places(handles)

    async def _check_places(self, handles: Sequence[TaskHandle[Any]]) -> None:
        by_partition: dict[Any, list[str]] = {}
        for handle in handles:
            by_partition.setdefault(handle.partition, []).append(handle.id)
        for partition, ids in by_partition.items():
            try:
                found = await all_places(self._producer.gateway, partition, ids)
            except AssertionError as error:
                self._journal.write("misplaced", task=None, problem=str(error)[:300])
                continue
            for task_id, places in found.items():
                if len(places) != 1:
                    self._journal.write("misplaced", task=task_id, problem=f"places: {places}")

    def _handle(self, task_id: str, queue: str, index: int) -> TaskHandle[Any]:
        partition = self._producer.namespace.partition(queue, index)
        return TaskHandle(task_id, partition, self._producer.gateway, self._producer.notifications)


async def _state(handle: TaskHandle[Any]) -> str:
    try:
        return str(await handle.status())
    except TaskNotFound:
        return "nowhere"
