"""The due set: tasks that wait for their time, and the move onto the stream when it has come."""

from __future__ import annotations

from .gateway import Gateway
from .keys import Partition
from .scripts import queue_script

__all__ = ["promote_due"]

_DUE = queue_script("due")
_PROMOTE = queue_script("promote")

_BATCH = 200


async def promote_due(gateway: Gateway, partition: Partition) -> tuple[int, float | None]:
    """Move tasks that are due onto the ready stream, a bounded number.

    Returns how many were moved, and the seconds until the next call makes sense: 0 where more are due already, None
    where nothing is scheduled. Two round trips, since a script must be told every key it touches; each id is looked
    at again inside the second, so several workers may promote at once.
    """
    ids, wait_ms = await gateway.run(_DUE, [partition.due], [_BATCH])
    moved = 0
    if ids:
        records = [partition.record(task_id.decode()) for task_id in ids]
        moved = await gateway.run(_PROMOTE, [partition.due, partition.ready, *records], ids)
    if len(ids) == _BATCH:
        return moved, 0.0
    return moved, None if wait_ms < 0 else wait_ms / 1000
