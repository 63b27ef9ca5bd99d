"""From what a person names to what is there: a task by its id, queues by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...queues import Partition, Producer, TaskHandle, TaskNotFound, queue_partitions
from .failures import Failed

__all__ = ["find_handle", "known_partitions"]


async def find_handle(producer: Producer, task_id: str) -> TaskHandle[Any]:
    """The task, in whichever queue it is. Raises `TaskNotFound`."""
    handle = await producer.find(task_id)
    if handle is None:
        raise TaskNotFound(task_id, f"any queue of namespace {producer.namespace.name!r} on {producer.address.shown}")
    return handle


async def known_partitions(producer: Producer, queue: str | None) -> Sequence[Partition]:
    """The partitions of one queue, or of all; a queue that nobody ever used is refused."""
    partitions = await queue_partitions(producer.gateway, producer.namespace, queue)
    if queue is not None and not partitions:
        known = {partition.queue for partition in await queue_partitions(producer.gateway, producer.namespace)}
        names = ", ".join(sorted(known)) or "none"
        raise Failed(f"no queue {queue!r} in namespace {producer.namespace.name!r}; there are: {names}")
    return partitions
