"""Which partitions a worker takes new messages of, and in which it serves what is already there.

It serves (claims, moves what is due, hears nudges) in all partitions of a queue's route. It takes new messages of the
generations up to the first that is not drained: of the next ones only when every message of the former was delivered
once. That is what keeps the order of a key across a change, and all workers do it by themselves: a generation that is
drained stays so. A former partition where nothing is that a worker could do is left alone, and looked at now and then.

Who of the workers that share a queue reads which partition.

Each partition has the workers that rank highest for it (rendezvous hashing: Thaler and Ravishankar, "A Name-Based
Mapping Scheme for Rendezvous", 1996). So all workers come to the same answer without asking each other, and when one
comes or goes, only its own partitions move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from ..keys import Namespace, Partition
from ..transport import Gateway, queue_script
from .resharding import PartitionStatus, close_previous, partition_status, sync_route
from .route import SINGLE, Generation, Route, spread

__all__ = ["READERS", "PartitionAssignment", "assigned_partitions", "join_group", "leave_group"]

_SHARE = queue_script("join_group")

READERS: Final = 2
"""Workers that read a partition, where there are so many: one may die and nobody waits for the others to notice."""


def assigned_partitions(worker: str, sharers: Collection[str], partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that are for `worker` to read, of all that the sharers have together."""
    return [partition for partition in partitions if worker in _readers(sharers, partition)]


def _readers(sharers: Collection[str], partition: Partition) -> list[str]:
    place = f"{partition.queue}:{partition.index}:"
    return nlargest(READERS, sharers, key=lambda sharer: (spread(place + sharer), sharer))


async def join_group(gateway: Gateway, namespace: Namespace, queue: str, worker: str, ttl: float) -> set[str]:
    """Say that a worker shares a queue, and hear who else does. ttl: seconds after which a silent one is gone."""
    found = await gateway.run(_SHARE, [namespace.sharing(queue)], [worker, round(ttl * 1000)])
    return {name.decode() for name in found}


async def leave_group(gateway: Gateway, namespace: Namespace, queue: str, worker: str) -> None:
    """Say that the worker has left: its partitions are the others' as soon as they look."""
    await gateway.command("ZREM", namespace.sharing(queue), worker)


_PRESENCE = 15.0
"""Seconds after which a silent worker's share is the others'."""

_SOME = 16
"""Former partitions that are reviewed at one look."""


@dataclass(slots=True)
class _Queue:
    name: str
    route: Route = SINGLE
    closed: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)
    empty: set[int] = field(default_factory=set)
    reviewed: int = 0
    members: set[str] = field(default_factory=set)
    taken_from: list[Partition] = field(default_factory=list)
    served: list[Partition] = field(default_factory=list)


class PartitionAssignment:
    """One worker's partitions, as of the last look."""

    def __init__(
        self, gateway: Gateway, namespace: Namespace, queues: Sequence[str], worker: str, *, share: bool
    ) -> None:
        """share: only its part of each queue's partitions, the rest being others' who share."""
        self._gateway = gateway
        self._namespace = namespace
        self._worker = worker
        self._share = share
        self._leaving = False
        self._queues = [_Queue(name) for name in queues]

    @property
    def taken_from(self) -> list[Partition]:
        """Where new messages are taken from."""
        return [partition for queue in self._queues for partition in queue.taken_from]

    @property
    def served(self) -> list[Partition]:
        """Where claims are made, due tasks are moved, and what was given back is taken up."""
        return [partition for queue in self._queues for partition in queue.served]

    @property
    def changing(self) -> bool:
        """Whether a generation has still to be drained: look again soon."""
        return any(_undrained(queue) for queue in self._queues)

    @property
    def known(self) -> list[Partition]:
        """All partitions of the routes, whoever reads them: those as well where nothing is but dead letters."""
        return [self._namespace.partition(queue.name, index) for queue in self._queues for index in queue.route.indexes]

    @property
    def routes(self) -> dict[str, Route]:
        return {queue.name: queue.route for queue in self._queues}

    async def refresh(self) -> None:
        """Hear of routes, complete changes that were begun, see what is drained and who shares."""
        for queue in self._queues:
            queue.route = await sync_route(self._gateway, self._namespace, queue.name, queue.route)
            former = [index for generation in queue.route.previous for index in generation.indexes]
            await self._review(queue, former)
            await self._close(queue, [index for index in former if index not in queue.closed])
            if self._share and not self._leaving:
                queue.members = await join_group(self._gateway, self._namespace, queue.name, self._worker, _PRESENCE)
            await self._follow(queue)

    async def follow_changes(self) -> None:
        """See only whether what was to be drained is drained by now: one question for each queue that changes."""
        for queue in self._queues:
            if _undrained(queue):
                await self._follow(queue)

    async def leave(self) -> None:
        """Leave its share to the others: from now on this worker takes nothing more."""
        self._leaving = True
        for queue in self._queues if self._share else ():
            await leave_group(self._gateway, self._namespace, queue.name, self._worker)

    async def _close(self, queue: _Queue, indexes: Sequence[int]) -> None:
        """Whoever began the change may have died before all was closed."""
        await close_previous(self._gateway, self._namespace, queue.name, queue.route, indexes)
        queue.closed.update(indexes)

    async def _follow(self, queue: _Queue) -> None:
        """See how far the queue is drained."""
        reached: list[Generation] = []
        for generation in queue.route.generations:
            reached.append(generation)
            if generation != queue.route.last and not await self._is_drained(queue, generation):
                break
        served = self._partitions(queue, queue.route.generations)
        queue.served = assigned_partitions(self._worker, queue.members, served) if self._share else served
        mine = set(queue.served)
        queue.taken_from = [partition for partition in self._partitions(queue, reached) if partition in mine]

    def _partitions(self, queue: _Queue, generations: Sequence[Generation]) -> list[Partition]:
        return [
            self._namespace.partition(queue.name, index)
            for generation in generations
            for index in generation.indexes
            if index not in queue.empty
        ]

    async def _is_drained(self, queue: _Queue, generation: Generation) -> bool:
        """Asks of one partition after another, until one is not drained: a deep backlog costs one question a look."""
        for index in generation.indexes:
            if index not in queue.drained and not await self._ask(queue, index):
                return False
        return True

    async def _review(self, queue: _Queue, former: Sequence[int]) -> None:
        """Look whether some former partitions are still as they were, another part of them each time.

        They may have become empty, or hold something again that was replayed. And a server that came back with less
        than it had may have lost the mark: then producers may use them again, and they are to be closed again.
        """
        start = queue.reviewed if queue.reviewed < len(former) else 0
        some = [index for index in former[start : start + _SOME] if index in queue.drained]
        queue.reviewed = start + _SOME
        await asyncio.gather(*(self._ask(queue, index) for index in some))

    async def _ask(self, queue: _Queue, index: int) -> bool:
        found = await partition_status(self._gateway, self._namespace.partition(queue.name, index))
        if found is PartitionStatus.OPEN:
            for known in (queue.closed, queue.drained, queue.empty):
                known.discard(index)
        if found >= PartitionStatus.DRAINED:
            queue.drained.add(index)
        if found is PartitionStatus.EMPTY:
            queue.empty.add(index)
        else:
            queue.empty.discard(index)
        return found >= PartitionStatus.DRAINED


def _undrained(queue: _Queue) -> bool:
    return any(index not in queue.drained for generation in queue.route.previous for index in generation.indexes)
