"""Tasks of a drop folder: `DIR/QUEUE/NAME.json` has one task, `DIR/QUEUE/NAME.jsonl` one in each line.

The objects are those of `perdure enqueue --file`. The id of a task without one is the digest of its file, for a line
with a hyphen and its number, so all of them may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

from ....queues.catalog import Catalog, read_catalog
from ....queues.depth import MaxDepth
from ....queues.durations import FutureTime
from ....queues.envelope import Options
from ....queues.errors import TaskExists
from ....queues.handle import TaskHandle
from ....queues.producer import Producer
from ....queues.wording import counted, listed
from ..enqueue import Defaults, Item, check, read_item
from ..support.connection import known_partitions, redis_now, seconds_of_delay, warn_unserved
from ..support.errors import Failed
from ..support.options import problem, read_lines
from .folder import NothingPublished, TakenFile

ENDS: Final = (".json", ".jsonl")

_BATCH: Final = 1000
"""Tasks of a file that are sent at once. A request to stop takes effect between two of them."""

_SHOWN_IDS: Final = 10


class Stopped(Exception):
    """The command was asked to stop in the middle of a file. The next one continues it."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Tasks of a file. id: of its task, or the first part of the ids of its lines. existed: number of known ones."""

    id: str
    tasks: int
    existed: int


class TaskIntake:
    """Enqueues the tasks of files that were taken."""

    def __init__(self, producer: Producer, stopping: Callable[[], bool]) -> None:
        """stopping: returns whether the command was asked to stop."""
        self._producer = producer
        self._stopping = stopping
        self._stored: dict[str, int] = {}
        """Lines that are stored, of files whose queue has no room for more, by the digest of the file."""
        self._served: set[tuple[str, str]] = set()
        """Queues and tasks for which it was checked that a worker serves them."""

    async def enqueue(self, file: TakenFile, queue: str) -> Enqueued:
        """Enqueue the tasks of a file, in the order of its lines.

        Raises:
            Failed, ValueError: The file is not valid. Nothing was enqueued, or the text says how many lines were.
            QueueFull: The queue has no room for more tasks; a later call continues.
            Stopped: The command was asked to stop.
            FileChanged: The file was written to.
            NothingPublished: No worker has published its tasks.
            PerdureError: Redis cannot be used now.
        """
        producer = self._producer
        catalog = await producer.catalog()
        try:
            items, catalog = await self._items(file, queue, catalog)
        except (Failed, ValueError, NothingPublished):  # the catalog is some seconds old: a worker may have started
            items, catalog = await self._items(file, queue, await read_catalog(producer.gateway, producer.namespace))
        file.check_unchanged()
        enqueued, names = await self._send(file, queue, items)
        if new := {name for name in names if (queue, name) not in self._served}:
            await warn_unserved(producer, {queue: new}, catalog)
            self._served |= {(queue, name) for name in new}
        return enqueued

    async def _items(self, file: TakenFile, queue: str, catalog: Catalog) -> tuple[Iterable[Item], Catalog]:
        """Check all tasks of a file, and return them, and the catalog. Raises as `enqueue` does."""
        producer = self._producer
        if not catalog.tasks:
            raise NothingPublished
        if all(task.queue != queue for task in catalog.tasks):
            await known_partitions(producer, queue)
        defaults = Defaults(
            None,
            queue,
            FutureTime(),
            None,
            Options(),
            producer.payload_limit,
            producer.large_limit,
            catalog,
            batch=_batch(file),
            now=await redis_now(producer) / 1000,
            only_queue=True,
            tenant=producer.namespace.tenant,
        )
        if file.name.endswith(".jsonl"):
            if check(file.file, defaults) == 0:
                raise Failed("it has no lines")
            return read_lines(file.file, partial(read_item, defaults=defaults)), catalog
        try:
            return [read_item(None, file.read(), defaults)], catalog
        except ValueError as error:
            raise Failed(problem(error)) from None

    async def _send(self, file: TakenFile, queue: str, items: Iterable[Item]) -> tuple[Enqueued, set[str]]:
        """Send tasks; return their number, and their names."""
        done = existed = 0
        stored = self._stored.get(file.digest, 0)
        task_id, names, conflicts = _batch(file), set[str](), list[TaskExists]()
        for (delay, unique, limit), run in groupby(items, key=attrgetter("delay", "unique", "limit")):
            start = await seconds_of_delay(self._producer, delay)
            room = None if limit is None else MaxDepth(limit.depth)  # without waiting: other queues may have room
            while batch := list(islice(run, _BATCH)):
                if done and self._stopping():
                    raise Stopped
                names |= {item.task for item in batch}
                if done >= stored:
                    try:
                        handles: list[TaskHandle[Any]] = await self._producer.send(
                            [item.message for item in batch], queue=queue, delay=start, unique=unique, limit=room
                        )
                    except TaskExists as error:  # the other tasks of the batch are stored
                        conflicts.append(error)
                    else:
                        existed += sum(handle.existed for handle in handles)
                        if not file.name.endswith(".jsonl"):
                            task_id = handles[0].id
                done += len(batch)
                self._stored[file.digest] = done
        del self._stored[file.digest]
        if conflicts:
            raise Failed(_conflicts(conflicts, done))
        return Enqueued(task_id, done, existed), names


def _batch(file: TakenFile) -> str:
    return f"drop-{file.digest}"


def _conflicts(errors: list[TaskExists], count: int) -> str:
    """Return the reason for which a file is rejected of which some lines have the ids of other tasks."""
    ids = [task_id for error in errors for task_id in error.task_ids]
    if count == 1:
        return str(errors[0])
    return (
        f"{counted(len(ids), 'line')} of {count:,} have ids of other tasks ({listed(ids, _SHOWN_IDS)}); the other "
        "lines are stored: correct the ids, and lay these lines down as a new file"
    )
