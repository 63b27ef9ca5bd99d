"""The partition assignment of a worker: the partitions that it reads from, and those that it serves.

A worker serves all partitions of a queue's route: it claims, promotes and gets nudges there. It reads new messages from
the generations up to the first one that is not drained, and from the next one only after each message of the previous
ones was delivered once. That keeps the order of a key across a change, and needs no agreement between workers, because
a drained generation stays drained. An empty partition of a previous generation is not served, but checked now and then.

Workers may share a queue: then each partition belongs to the workers that rank highest for it (rendezvous hashing:
Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996). All workers compute the same assignment
without communication, and when a worker comes or goes, only its own partitions move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from ..errors import ServerFull
from ..junk import split
from ..keys import LEFT_TTL_MS, Namespace, Partition
from ..lanes import LANES, Lane, first_index
from ..transport.gateway import Gateway
from ..transport.scripts import milliseconds, queue_script
from .resharding import PartitionStatus, close_previous, open_again, partition_status, sync_route
from .route import SINGLE, Generation, Route, spread

_JOIN = queue_script("join_group")

READERS: Final = 2
"""Workers that read a partition, if there are so many: if one dies, its partitions still have a reader."""


def assigned_partitions(worker: str, members: Collection[str], partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions of `worker`, of all that the members share."""
    return [partition for partition in partitions if worker in _readers(members, partition)]


def _readers(members: Collection[str], partition: Partition) -> list[str]:
    prefix = f"{partition.queue}:{partition.index}:"
    return nlargest(READERS, members, key=lambda member: (spread(prefix + member), member))


async def join_group(gateway: Gateway, namespace: Namespace, queue: str, worker: str, ttl: float) -> set[str]:
    """Add a worker to a queue's members; return all members. ttl: seconds after which a silent one is removed."""
    found = await gateway.run(_JOIN, [namespace.sharing(queue)], [worker, round(ttl * 1000), LEFT_TTL_MS])
    return set(split(found).good)


async def leave_group(gateway: Gateway, namespace: Namespace, queue: str, worker: str) -> None:
    """Remove a worker from a queue's members for good: the others take its partitions at their next refresh."""
    key = namespace.sharing(queue)
    now = milliseconds(await gateway.command("TIME", node_of=key))
    with suppress(ServerFull):  # which refuses the mark; the other commands are executed
        await gateway.pipeline(
            [
                ("ZREM", key, worker),
                ("ZADD", key, -now, worker),
                ("PEXPIRE", key, LEFT_TTL_MS),
            ]
        )


_MEMBER_TTL: Final = 15.0
"""Seconds after which the others take the partitions of a silent worker."""

_CHECKS: Final = 16
"""Drained partitions that one refresh checks, and partitions of the last generation."""


@dataclass(slots=True)
class _Lane:
    """One lane of a queue, and its part of the route."""

    queue: str
    route: Route = SINGLE
    closed: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)
    empty: set[int] = field(default_factory=set)
    checked: int = 0
    looked_at: int = 0
    read_from: list[Partition] = field(default_factory=list)
    served: list[Partition] = field(default_factory=list)


@dataclass(slots=True)
class _Queue:
    """A queue: its route, the lanes that this worker adds to it, and those that are in use."""

    name: str
    wanted: set[Lane]
    route: Route = SINGLE
    lanes: dict[Lane, _Lane] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    searched: int = 0


class PartitionAssignment:
    """The partitions of one worker, as of the last refresh."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        queues: Sequence[str],
        worker: str,
        *,
        share: bool,
        lanes: Mapping[str, Collection[Lane]] | None = None,
    ) -> None:
        """Args:
        share: divide the partitions of each queue with the other workers that share it.
        lanes: lanes of the tasks of each queue, which are added to its route.
        """
        lanes = lanes or {}
        self._gateway = gateway
        self._namespace = namespace
        self._worker = worker
        self._share = share
        self._leaving = False
        self._queues = [_Queue(name, set(lanes.get(name, ()))) for name in queues]

    @property
    def _lanes(self) -> list[_Lane]:
        return [lane for queue in self._queues for lane in queue.lanes.values()]

    @property
    def read_from(self) -> list[Partition]:
        """Partitions to read new messages from."""
        return [partition for lane in self._lanes for partition in lane.read_from]

    @property
    def served(self) -> list[Partition]:
        """Partitions to claim in, to promote in, and to take released messages from."""
        return [partition for lane in self._lanes for partition in lane.served]

    @property
    def changing(self) -> bool:
        """Whether a generation is not drained yet: refresh again soon."""
        return any(_undrained(lane) for lane in self._lanes)

    @property
    def known(self) -> list[Partition]:
        """All partitions of the routes, also those of other workers and those that hold only dead letters."""
        return [self._namespace.partition(queue.name, index) for queue in self._queues for index in queue.route.indexes]

    @property
    def routes(self) -> dict[str, Route]:
        return {queue.name: queue.route for queue in self._queues}

    async def refresh(self) -> None:
        """Read the routes and the members, complete unfinished changes, and check which partitions are drained."""
        for queue in self._queues:
            queue.route = await sync_route(self._gateway, self._namespace, queue.name, queue.route, queue.wanted)
            if lost := await self._lost_lanes(queue):
                queue.wanted |= lost
                queue.route = await sync_route(self._gateway, self._namespace, queue.name, queue.route, lost)
            for name in queue.route.lanes:
                lane = queue.lanes.setdefault(name, _Lane(queue.name))
                lane.route = queue.route.of(name) or lane.route
                previous = [index for generation in lane.route.previous for index in generation.indexes]
                await self._check_drained(lane, previous)
                await self._check_open(lane)
                await self._close(queue, lane, [index for index in previous if index not in lane.closed])
            if self._share and not self._leaving:
                queue.members = await join_group(self._gateway, self._namespace, queue.name, self._worker, _MEMBER_TTL)
            for lane in queue.lanes.values():
                await self._follow(queue, lane)

    async def _lost_lanes(self, queue: _Queue) -> set[Lane]:
        """Return lanes with tasks that the route does not have: the server lost it after a producer had read it.

        That producer has stored tasks since, and stores the route again with the next one at the earliest. Some
        partitions of each lane, the next ones each time.
        """
        missing: list[Lane] = [lane for lane in LANES if lane not in queue.route.lanes]
        start = queue.searched if queue.searched < queue.route.last.count else 0
        queue.searched = min(start + _CHECKS, queue.route.last.count)
        numbers = range(start, queue.searched)
        partitions = [
            self._namespace.partition(queue.name, first_index(lane) + number) for lane in missing for number in numbers
        ]
        found = await self._gateway.pipeline([("EXISTS", one.ready, one.due, one.timeline) for one in partitions])
        return {partition.lane for partition, exists in zip(partitions, found, strict=True) if exists}

    def want(self, queue: str, lane: Lane) -> None:
        """Add a lane to the route of a queue of this worker, at the next refresh: a producer may not."""
        for known in self._queues:
            if known.name == queue:
                known.wanted.add(lane)

    async def follow_changes(self) -> None:
        """Check only whether generations are drained by now: one round trip for each queue that changes."""
        for queue in self._queues:
            for lane in queue.lanes.values():
                if _undrained(lane):
                    await self._follow(queue, lane)

    async def leave(self) -> None:
        """Release the partitions to the other workers, and read no more."""
        self._leaving = True
        for queue in self._queues if self._share else ():
            await leave_group(self._gateway, self._namespace, queue.name, self._worker)

    async def _close(self, queue: _Queue, lane: _Lane, indexes: Sequence[int]) -> None:
        """Close partitions: the process that started the change may have died before."""
        await close_previous(self._gateway, self._namespace, queue.name, queue.route, indexes)
        lane.closed.update(indexes)

    async def _follow(self, queue: _Queue, lane: _Lane) -> None:
        """Compute the assignment from how far a lane is drained."""
        reached: list[Generation] = []
        for generation in lane.route.generations:
            reached.append(generation)
            if generation != lane.route.last and not await self._is_drained(lane, generation):
                break
        served = self._partitions(lane, lane.route.generations)
        lane.served = assigned_partitions(self._worker, queue.members, served) if self._share else served
        mine = set(lane.served)
        lane.read_from = [partition for partition in self._partitions(lane, reached) if partition in mine]

    def _partitions(self, lane: _Lane, generations: Sequence[Generation]) -> list[Partition]:
        return [
            self._namespace.partition(lane.queue, index)
            for generation in generations
            for index in generation.indexes
            if index not in lane.empty
        ]

    async def _is_drained(self, lane: _Lane, generation: Generation) -> bool:
        """Check one partition after another until one is not drained: a long backlog costs one round trip."""
        for index in generation.indexes:
            if index not in lane.drained and not await self._ask(lane, index):
                return False
        return True

    async def _check_drained(self, lane: _Lane, previous: Sequence[int]) -> None:
        """Check some drained partitions again, the next ones each time.

        They may have become empty, or hold a replayed task. A server may have lost the mark in a restart: then
        producers may write into a partition again, and it must be closed again.
        """
        start = lane.checked if lane.checked < len(previous) else 0
        some = [index for index in previous[start : start + _CHECKS] if index in lane.drained]
        lane.checked = start + _CHECKS
        await asyncio.gather(*(self._ask(lane, index) for index in some))

    async def _check_open(self, lane: _Lane) -> None:
        """Do for producers what they may lack the right to do: move away what another program put under their keys.

        Some partitions of the last generation, the next ones each time.
        """
        partitions = [self._namespace.partition(lane.queue, index) for index in lane.route.last.indexes]
        start = lane.looked_at if lane.looked_at < len(partitions) else 0
        some = partitions[start : start + _CHECKS]
        lane.looked_at = start + _CHECKS
        written = ("ready", "nudge", "due", "timeline", "closed", "rings")
        await self._gateway.set_keys_aside(getattr(partition, name) for partition in some for name in written)
        marks = await self._gateway.pipeline([("EXISTS", partition.closed) for partition in some])
        for partition, mark in zip(some, marks, strict=True):
            if mark:
                await open_again(self._gateway, partition)

    async def _ask(self, lane: _Lane, index: int) -> bool:
        found = await partition_status(self._gateway, self._namespace.partition(lane.queue, index))
        if found is PartitionStatus.OPEN:
            for known in (lane.closed, lane.drained, lane.empty):
                known.discard(index)
        if found >= PartitionStatus.DRAINED:
            lane.drained.add(index)
        if found is PartitionStatus.EMPTY:
            lane.empty.add(index)
        else:
            lane.empty.discard(index)
        return found >= PartitionStatus.DRAINED


def _undrained(lane: _Lane) -> bool:
    return any(index not in lane.drained for generation in lane.route.previous for index in generation.indexes)
