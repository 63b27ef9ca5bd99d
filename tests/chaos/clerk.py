"""The clerk: a person who looks at the run, and does what no producer has done, since it was killed.

It answers the waits that are open for long, cancels the parents of children that wait for ever, and replays the dead
children whose parents wait for that. It bypasses the proxies.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from perdure import Producer, TaskHandle
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Partition, QueueError
from perdure.queues.inspection.views import find_task, queue_partitions
from perdure.queues.waits import OpenWait, list_waiting

from .journal import JournalWriter

__all__ = ["Clerk"]

_PATIENCE: Final = 4.0
"""Seconds for which a wait is left to the producers."""


class Clerk:
    """Looks at all tasks that wait."""

    def __init__(self, producer: Producer, journal: JournalWriter) -> None:
        self._producer = producer
        self._journal = journal
        self._since: dict[tuple[str, str], float] = {}
        self._number = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._look()
            except QueueError as error:
                self._journal.write("blind", error=str(error)[:200])

    async def _look(self) -> None:
        gateway = self._producer.gateway
        partitions = await queue_partitions(gateway, self._producer.namespace)
        async for waiting in list_waiting(gateway, partitions):
            for wait in waiting.waits.open:
                since = self._since.setdefault((waiting.task_id, wait.id), time.monotonic())
                if time.monotonic() - since > _PATIENCE and not wait.answered:
                    await self._end(waiting.partition, waiting.task_id, wait)
        async for letter in list_letters(gateway, partitions, Filter(task="lapsing")):
            await self._replay(letter)

    async def _end(self, partition: Partition, task: str, wait: OpenWait) -> None:
        if wait.name == "never":
            await self._cancel(wait.why)
            return
        self._number += 1
        nonce = f"clerk:{self._number}"
        self._journal.write("answering", task=task, by="id", to=wait.id, nonce=nonce)
        try:
            await self._handle(partition, task).answer(wait.id, {"nonce": nonce}, by="clerk", answer_id=nonce)
        except QueueError as error:
            self._journal.write("refused", task=task, nonce=nonce, error=f"{type(error).__name__}: {error}"[:200])
        else:
            self._journal.write("answered", task=task, by="id", to=wait.id, nonce=nonce)

    async def _cancel(self, task: str) -> None:
        partition = await find_task(self._producer.gateway, self._producer.namespace, task)
        if partition is not None:
            self._journal.write("cancel", task=task)
            with suppress(QueueError):
                self._journal.write("answer", task=task, state=await self._handle(partition, task).cancel())

    async def _replay(self, letter: DeadLetter) -> None:
        self._number += 1
        number = f"clerk-{self._number}"
        self._journal.write("fault", number=number, kind="replay", pids=[], fresh=False, letter=letter.id)
        try:
            await replay(self._producer.gateway, letter, Replay())
        finally:
            self._journal.write("fault_over", number=number)

    def _handle(self, partition: Partition, task: str) -> TaskHandle[object]:
        return TaskHandle(task, partition, self._producer.gateway, self._producer.notifications)
