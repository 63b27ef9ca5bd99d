"""Producer of the run: enqueues tasks of every kind, waits for their outcomes, cancels some.

`python -m tests.chaos.producer SEED RATE MIX`. At SIGTERM it stops enqueuing and waits on; its parent ends it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from typing import Any, Final

from perdure import App, Producer, State, TaskCancelled, TaskFailed, TaskHandle, Unavailable
from perdure.queues import CatalogError, QueueError
from perdure.queues.lanes import Priority

from .instrumentation import JOURNAL
from .kinds import KINDS, drawn
from .respondent import Respondent
from .sessions import Speaker

__all__ = ["TaskSource"]

MAX_WAITED_FOR: Final = 120
"""Tasks without outcome at which a producer holds back, so that no backlog grows beyond the run."""


class TaskSource:
    """Enqueues tasks drawn from its seed, and waits for them."""

    def __init__(self, producer: Producer, seed: int, rate: float, mix: str) -> None:
        """rate: tasks per second; 0 for none. mix: see `drawn`."""
        self._producer = producer
        self._dice = random.Random(seed)
        self._seed = seed
        self._name = f"{seed}-{os.getpid()}"
        self._rate = rate
        self._kinds = drawn(mix)
        self._respondent = Respondent(producer, self._name, self._dice, JOURNAL)
        self._number = 0
        self._finishing = asyncio.Event()
        if not rate:
            self._finishing.set()
        self._waiting: set[asyncio.Task[None]] = set()

    def finish(self) -> None:
        """Enqueue nothing more."""
        self._finishing.set()

    async def run(self) -> None:
        """Enqueue until `finish` is called, then wait for the tasks; the process stays."""
        JOURNAL.write("process", role="producer", version="this", package="", parent=os.getppid())
        speaking = asyncio.create_task(Speaker(App("chaos"), self._name, self._seed, JOURNAL).run())
        while not self._finishing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._finishing.wait(), self._dice.expovariate(self._rate))
            if len(self._waiting) < MAX_WAITED_FOR and not self._finishing.is_set():
                await self._enqueue()
        speaking.cancel()
        JOURNAL.write("finishes")
        await asyncio.Event().wait()

    async def _enqueue(self) -> None:
        kind = self._dice.choices(self._kinds, [KINDS[name].weight for name in self._kinds])[0]
        args: dict[str, Any] = {"steps": self._dice.randint(2, 5), "pause": round(self._dice.uniform(0.02, 0.35), 3)}
        draw = self._dice.random()
        if kind == "agent":
            args["goal"] = "take all parts"
        if KINDS[kind].limits:
            args["tenant"] = f"{self._name}-{self._dice.randrange(3)}"
        plain = not KINDS[kind].limits and kind != "keyed"
        priority: Priority | None = self._dice.choice(("high", "low")) if plain and self._dice.random() < 0.25 else None
        if kind == "keyed":
            await self._one(kind, args, key=f"{self._name}-{self._dice.randrange(3)}")
        elif draw < 0.06:
            await self._many(kind, args)
        else:
            delay = round(self._dice.uniform(0.1, 3.0), 3) if draw < 0.2 else 0.0
            handle = await self._one(kind, args, delay=delay, priority=priority)
            if handle is not None and kind == "agent":
                self._start(self._talk(handle, self._dice.randint(0, 3), args["pause"]))
            if handle is not None and KINDS[kind].waits:
                self._start(self._respondent.attend(handle, kind, args["pause"]))
            if handle is not None and self._dice.random() < KINDS[kind].cancelled:
                self._start(self._cancel(handle, self._dice.uniform(0.0, 1.5)))

    async def _one(
        self,
        kind: str,
        args: dict[str, Any],
        *,
        delay: float = 0.0,
        key: str | None = None,
        priority: Priority | None = None,
    ) -> TaskHandle[Any] | None:
        """Enqueue under one id until the task is stored, as a caller does that must not lose it."""
        self._number += 1
        task_id = f"{kind}-{self._name}-{self._number}"
        JOURNAL.write("enqueue", task=task_id, kind=kind, args=args, delay=delay, key=key)
        while True:
            try:
                handle = await self._producer.enqueue(
                    kind, args, queue=_queue(kind), delay=delay, key=key, task_id=task_id, priority=priority
                )
            except (Unavailable, CatalogError) as error:  # or no worker has published its tasks yet
                JOURNAL.write("unacknowledged", task=task_id, error=str(error)[:200])
                await asyncio.sleep(0.2)
                continue
            self._acknowledged(handle, kind, key)
            return handle

    async def _many(self, kind: str, args: dict[str, Any]) -> None:
        """Make a bulk call, whose tasks get generated ids. No caller relies on a task that it does not acknowledge."""
        try:
            handles = await self._producer.enqueue_many(kind, [args] * 3, queue=_queue(kind))
        except (Unavailable, CatalogError) as error:
            JOURNAL.write("unacknowledged", task=None, error=str(error)[:200])
            return
        for handle in handles:
            self._acknowledged(handle, kind, None)

    def _acknowledged(self, handle: TaskHandle[Any], kind: str, key: str | None) -> None:
        place = handle.partition
        JOURNAL.write("acknowledged", task=handle.id, kind=kind, queue=place.queue, partition=place.index, key=key)
        self._start(self._wait(handle))
        if self._dice.random() < 0.1:
            self._start(self._wait(handle))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _wait(self, handle: TaskHandle[Any]) -> None:
        while True:
            try:
                result = await handle.result()
            except TaskFailed as failed:
                JOURNAL.write("outcome", task=handle.id, state=State.DEAD, reason=failed.reason)
            except TaskCancelled:
                JOURNAL.write("outcome", task=handle.id, state=State.CANCELLED)
            except Unavailable:  # before it waited
                await asyncio.sleep(0.2)
                continue
            except QueueError as error:
                JOURNAL.write("outcome", task=handle.id, state="unknown", reason=f"{type(error).__name__}: {error}")
            else:
                JOURNAL.write("outcome", task=handle.id, state=State.SUCCEEDED, result=result)
            return

    async def _talk(self, handle: TaskHandle[Any], messages: int, pause: float) -> None:
        """Send messages to a running agent, one after the other, each until it is stored or the agent has ended."""
        for number in range(messages):
            await asyncio.sleep(self._dice.uniform(0, 3 * pause))
            text = f"({handle.id}/{number})"
            while True:
                try:
                    await handle.send(text, sender=self._name, message_id=text)
                except Unavailable:
                    await asyncio.sleep(0.2)
                except QueueError:  # it has ended, or Redis has lost it
                    return
                else:
                    JOURNAL.write("sent", task=handle.id, text=text)
                    break

    async def _cancel(self, handle: TaskHandle[Any], after: float) -> None:
        await asyncio.sleep(after)
        JOURNAL.write("cancel", task=handle.id)
        try:
            JOURNAL.write("answer", task=handle.id, state=await handle.cancel())
        except QueueError as error:
            JOURNAL.write("unanswered", task=handle.id, error=str(error)[:200])


def _queue(kind: str) -> str | None:
    """Return the queue that a call names; None if the catalog is to say which limits the task has."""
    return None if KINDS[kind].limits else KINDS[kind].queue


async def main() -> None:
    async with Producer() as producer:
        source = TaskSource(producer, int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, source.finish)
        await source.run()


if __name__ == "__main__":
    asyncio.run(main())
