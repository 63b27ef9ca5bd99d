"""Changes of the number of partitions while tasks run, and callers that know different routes of the queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import anyio
from perdure import Producer
from perdure.queues import QueueError, Unavailable
from perdure.queues.keys import GROUP
from perdure.queues.partitions.resharding import set_partitions

from ..app import NAMESPACE

if TYPE_CHECKING:
    from ..plan import Fault
    from ..world import World

__all__ = ["KeyOrder", "RecordPlaces", "ask_again", "reshard"]

_MAX: Final = 3
"""Partitions of a queue at most."""


async def reshard(world: World, fault: Fault) -> None:
    """Spread the queue over another number of partitions, as a deployment does."""

    async def act() -> None:
        if (producer := world.producer) is not None:
            try:
                route = await set_partitions(producer.gateway, producer.namespace, "sim", 1 + fault.target % _MAX)
            except QueueError as error:
                world.tell(f"resharding: {error}")
            else:
                world.tell(f"the queue has the partitions {list(route.last.indexes)} from now on")

    world.on_producer(act)


async def ask_again(world: World, url: str) -> None:
    """Enqueue every second task, and all stored ones again under their ids every few seconds."""
    async with Producer(url, namespace=NAMESPACE) as producer, anyio.create_task_group() as group:
        for task in world.plan.tasks[1::2]:
            group.start_soon(world.enqueue, producer, task)
        while True:
            await anyio.sleep(world.plan.again)
            for task in world.plan.tasks:
                if task.id in world.handles and task.id not in world.cancelled:
                    try:
                        world.handles[task.id] = await world.store(producer, task)
                    except Unavailable as error:
                        world.tell(f"asking for {task.id} again: {error}")
                    else:
                        world.journal.write("asked", task.id)


class RecordPlaces:
    """Partitions that have a record of a task. A task has one record, whatever route a caller knew."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._homes: defaultdict[bytes, list[bytes]] = defaultdict(list)

    def check(self, tag: bytes, task: bytes) -> None:
        """Check the partition of a record that a command has named."""
        items, homes = self._world.server.items, self._homes[task]
        if tag not in homes and tag + b":record:" + task in items:
            homes.append(tag)
        if len(homes) > 1:
            homes[:] = [one for one in homes if one + b":record:" + task in items]
        if len(homes) > 1:
            self._world.checks.add("two records", f"{task.decode()} is in {b' and '.join(homes).decode()}")


class KeyOrder:
    """Order in which tasks of one key are delivered first.

    Attributes:
        called: Virtual time at which the caller first asked for a task, by id.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.called: dict[str, float] = {}
        self._delivered: dict[str, float] = {}

    def read(self, stream: bytes, messages: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Note which messages of a stream are delivered, after a command has read some."""
        item = self._world.server.items.get(stream)
        group = None if item is None else item.value.group_get(GROUP.encode())
        pending = {entry.encode() for entry in group.pel} if group is not None else ()
        for entry, task in messages:
            if entry in pending and task is not None:
                self._delivered.setdefault(task.decode(), self._world.loop.now)

    def finish(self) -> None:
        """Check that a task was delivered after those of its key that were stored before the caller asked for it."""
        world, acked = self._world, dict[str, float]()
        if world.server.lost:  # a task that the server lost was stored again later
            return
        for entry in world.journal.entries:
            if entry.what == "acked":
                acked.setdefault(entry.task, entry.at)
        keyed = [task for task in world.plan.tasks if task.key and not task.delay and task.id in self._delivered]
        for later in keyed:
            for earlier in keyed:
                same = (earlier.key, earlier.lane) == (later.key, later.lane)
                before = same and acked[earlier.id] < self.called[later.id]
                if before and self._delivered[earlier.id] > self._delivered[later.id]:
                    world.checks.add("key order", f"{later.id} came before {earlier.id}, both of {later.key!r}")
