"""Who of the workers that share a queue reads which partition.

Each partition has the workers that rank highest for it (rendezvous hashing: Thaler and Ravishankar, "A Name-Based
Mapping Scheme for Rendezvous", 1996). So all workers come to the same answer without asking each other, and when one
comes or goes, only its own partitions move.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import nlargest
from typing import Final

from .gateway import Gateway
from .keys import Namespace, Partition
from .routes import spread
from .scripts import queue_script

__all__ = ["READERS", "share_of", "share_queue", "unshare_queue"]

_SHARE = queue_script("share")

READERS: Final = 2
"""Workers that read a partition, where there are so many: one may die and nobody waits for the others to notice."""


def share_of(worker: str, sharers: Collection[str], partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that are for `worker` to read, of all that the sharers have together."""
    return [partition for partition in partitions if worker in _readers(sharers, partition)]


def _readers(sharers: Collection[str], partition: Partition) -> list[str]:
    place = f"{partition.queue}:{partition.index}:"
    return nlargest(READERS, sharers, key=lambda sharer: (spread(place + sharer), sharer))


async def share_queue(gateway: Gateway, namespace: Namespace, queue: str, worker: str, ttl: float) -> set[str]:
    """Say that a worker shares a queue, and hear who else does. ttl: seconds after which a silent one is gone."""
    found = await gateway.run(_SHARE, [namespace.sharing(queue)], [worker, round(ttl * 1000)])
    return {name.decode() for name in found}


async def unshare_queue(gateway: Gateway, namespace: Namespace, queue: str, worker: str) -> None:
    """Say that the worker has left: its partitions are the others' as soon as they look."""
    await gateway.command("ZREM", namespace.sharing(queue), worker)
