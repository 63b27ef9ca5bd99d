"""The due set: tasks that wait for their time, and the move onto the stream when it has come.

Work that one worker does for all of them, once in a while: whoever comes first takes the turn.

A turn saves work and protects nothing: what is done in it may as well be done by two. So it is never given back, and
the worker that took it may die; the next turn comes with its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from ..errors import ServerFull
from ..keys import Partition
from ..transport import Command, Gateway, queue_script

__all__ = ["promote_due", "take_turns", "watch_due"]

_DUE = queue_script("due")
_PROMOTE = queue_script("promote")

_BATCH = 200

_WATCH_FOR: Final = 2.5
"""Seconds that a worker watches a due set for without saying so again: how late a due task may come where it died."""


async def watch_due(gateway: Gateway, partition: Partition, worker: str, *, take_over: bool = False) -> float:
    """Be the one worker that promotes what is due on a partition: 500 that wake for the same task are a herd.

    Returns 0 where it is, for now; else the seconds for which another one is. take_over: be it in any case: this worker
    was told of an earlier due time, which the other one does not know. Two that watch for a moment do no harm, so plain
    commands will do, and whoever only sees that another one watches costs next to nothing.
    """
    vacant: tuple[str, ...] = ()
    if not take_over:
        watcher, left_ms = await gateway.pipeline([("GET", partition.watch), ("PTTL", partition.watch)])
        if watcher not in (None, worker.encode()):
            return float(max(1, left_ms)) / 1000
        vacant = ("NX",) if watcher is None else ()
    try:
        ask: Command = ("SET", partition.watch, worker, "PX", round(_WATCH_FOR * 1000), *vacant)
        taken = await gateway.command(*ask)
    except ServerFull:
        return 0.0  # nobody can be the one: then everybody is
    return 0.0 if taken is not None else _WATCH_FOR


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


T = TypeVar("T")


async def take_turns(gateway: Gateway, turns: Mapping[T, str], worker: str, seconds: float) -> list[T]:
    """Those turns that nobody has taken in the last `seconds`; this worker's now. turns: each with its key.

    One round trip. Where a reply is lost and the command asked again, nobody has the turn until its time is over. On a
    full server nobody can take a turn, so everybody has all of them.
    """
    asked = [("SET", key, worker, "NX", "PX", max(1, round(seconds * 1000))) for key in turns.values()]
    try:
        taken = await gateway.pipeline(asked)
    except ServerFull:
        return list(turns)
    return [turn for turn, reply in zip(turns, taken, strict=True) if reply is not None]
