"""Pages that read the streams of tasks: a process that may be killed, and starts again with what its pages had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from perdure import Producer, StreamItem, TaskHandle
from perdure.queues import QueueError, TaskNotFound
from perdure.queues.errors import StreamTrimmed

from .streams import STREAMING, STREAMS

if TYPE_CHECKING:
    from ..loop import Machine
    from ..plan import Fault
    from ..world import World

__all__ = ["Pages", "Reader", "kill_page", "number_of"]


@dataclass
class Reader:
    """A page that shows one stream of a task. What it has survives its process, as the storage of a browser does.

    Attributes:
        delay: Seconds after the task was stored at which it is opened.
        last: Items with which it begins; None for all.
        patience: Items after which it is loaded again from its cursor; 0 for never.
        shown: Items that no mark has voided.
        seen: Number of the first item or mark, by task.
        opened: Virtual time of its last load; ended: of its end.
        end: The terminal item. gone: whether the task was not found.
        loads: How often it was loaded. trimmed: whether it missed items that were trimmed.
    """

    task: str
    stream: str
    delay: float = 0.0
    last: int | None = None
    patience: int = 0
    shown: list[StreamItem] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    cursor: str | None = None
    opened: float = 0.0
    ended: float = 0.0
    end: StreamItem | None = None
    gone: bool = False
    loads: int = 0
    trimmed: bool = False

    def __str__(self) -> str:
        how = f", last={self.last}" if self.last is not None else ""
        return f"the reader of {self.stream} of {self.task} ({self.delay:g} s{how}, again after {self.patience})"

    @property
    def done(self) -> bool:
        return self.gone or self.end is not None

    def take(self, item: StreamItem, at: float) -> None:
        """Show an item, or drop what a mark voids."""
        if item.kind == "end":
            self.end, self.ended = item, at
        self.shown = [shown for shown in self.shown if not item.voids(shown)]
        if item.kind == "item":
            self.shown.append(item)
        if item.kind == "cut_off" and item.reason == "lost":
            self.seen[item.task_id] = 1  # it begins again
        elif item.kind != "end":
            self.seen.setdefault(item.task_id, number_of(item))
        self.cursor = item.cursor


class Pages:
    """A process with pages that read the streams of tasks. It may be killed, and starts again with what they had."""

    def __init__(self, world: World) -> None:
        self.readers = [*_drawn(world)]
        self._world = world
        self._machine: Machine | None = None

    def start(self) -> None:
        """Start the process."""
        if self.readers:
            self._machine = self._world.spawn("page", self._run)

    def kill(self) -> bool:
        """End the process as SIGKILL does; return whether it ran."""
        if self._machine is None:
            return False
        self._world.end_machine(self._machine)
        self._machine = None
        return True

    @property
    def busy(self) -> list[str]:
        """The readers that have not ended."""
        return [str(reader) for reader in self.readers if not reader.done]

    async def _run(self) -> None:
        world = self._world
        while True:
            try:
                async with Producer(world.url, namespace="sim") as producer, anyio.create_task_group() as group:
                    for reader in self.readers:
                        group.start_soon(self._read, reader, producer)
            except QueueError as error:
                world.tell(f"the page starts again: {error}")
                await anyio.sleep(0.2)
            else:
                return

    async def _read(self, reader: Reader, producer: Producer) -> None:
        world = self._world
        while reader.task not in world.handles:  # noqa: ASYNC110 - another process stores it
            await anyio.sleep(0.3)
        await anyio.sleep(reader.delay)
        while not reader.done:
            handle = TaskHandle[Any](
                reader.task, world.handles[reader.task].partition, producer.gateway, producer.notifications
            )
            reader.opened, reader.loads = world.loop.now, reader.loads + 1
            try:
                await self._follow(reader, handle)
            except TaskNotFound as error:
                world.tell(f"{reader}: {error}")
                reader.gone = True
            except StreamTrimmed as error:
                reader.trimmed = True
                reader.cursor = error.after

    async def _follow(self, reader: Reader, handle: TaskHandle[Any]) -> None:
        where: dict[str, Any] = {"last": reader.last} if reader.cursor is None else {"after": reader.cursor}
        left = reader.patience
        async with aclosing(handle.stream(reader.stream, **where)) as items:
            async for item in items:
                reader.take(item, self._world.loop.now)
                left -= 1
                if left == 0:
                    break


def _drawn(world: World) -> Iterator[Reader]:
    """Yield readers of the tasks of a plan."""
    dice = Random(f"pages {world.plan.seed}")
    for task in world.plan.tasks:
        if task.kind in STREAMING:
            stream = dice.choice(STREAMS)
            yield Reader(task.id, "tokens" if task.kind == "floods" else stream)
            yield Reader(task.id, dice.choice(STREAMS), dice.choice((0.0, 1.0)), patience=dice.choice((1, 2, 5)))
            yield Reader(task.id, dice.choice(STREAMS), dice.choice((0.5, 2.0, 9.0)), dice.choice((0, 1, 2, 5)))


async def kill_page(world: World, fault: Fault) -> None:
    """Kill the process of the pages; it is started again after a while."""
    if world.pages.kill():
        world.later(fault.size, world.pages.start)


def number_of(item: StreamItem) -> int:
    """Return the number of an item in its stream."""
    return int(item.cursor.partition("@")[0])
