"""The due set: scheduled tasks, and their promotion to the ready stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from ..envelope import is_task_id
from ..junk import set_aside, split
from ..keys import DATA_FORMAT, GROUP, RELEASED, Partition
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .leases import RELEASED_IDLE_MS

_DUE = queue_script("due")
_PROMOTE = queue_script("promote")
_WAKE = queue_script("wake_version")

CANCEL_REQUEST: Final = b"~cancel "
"""Start of a member that is no task, but a request of a producer to cancel one: see cancellation.py."""

_BATCH: Final = 200
"""Tasks that one script moves at most, of each set."""

_MAX_WAKES: Final = 100
"""Scripts of one call that wakes tasks: the other chores of the worker come next."""


async def promote_due(
    gateway: Gateway,
    partition: Partition,
    *,
    for_claim: bool = False,
    on_requests: Callable[[Sequence[bytes]], Awaitable[None]] | None = None,
    admit: Callable[[Partition, float], Awaitable[float | None]] | None = None,
    renew_kept: Callable[[Partition], Awaitable[float]] | None = None,
) -> tuple[int, float | None]:
    """Move due tasks to the ready stream, a bounded number.

    The promotion takes two round trips, because a script must be given every key it touches. The second script checks
    each task again, so several workers may promote at once.

    Args:
        for_claim: Release the messages for the caller's worker, which claims them next: no blocked read returns them.
        on_requests: Called with the requests to cancel tasks before the tasks are moved; it removes them. None leaves
            them for another call.
        admit: Called if tasks wait for limits, with the seconds until any has its turn, 0 for now; returns the seconds
            until it is to be called again, None if none waits. None leaves them for another call.
        renew_kept: Called if tokens of parked tasks are to be renewed; returns the seconds until it is to be called
            again. None leaves them for another call.

    Returns:
        How many tasks were moved, and the seconds until the next call makes sense: 0 if more are due already, None if
        nothing is scheduled.
    """
    ids, wait_ms, look_ms, kept_ms = await gateway.run(_DUE, [partition.due, partition.rings, partition.kept], [_BATCH])
    moved, to_lists = 0, False
    if ids:
        requests = [member for member in ids if member.startswith(CANCEL_REQUEST)]
        if requests and on_requests is not None:
            await on_requests(requests)
        tasks, foreign = split((member for member in ids if not member.startswith(CANCEL_REQUEST)), is_task_id)
        await set_aside(gateway, partition, partition.due, "zset", foreign)
        kept: list[Argument] = [GROUP, RELEASED, RELEASED_IDLE_MS] if for_claim else []
        if tasks:
            records = map(partition.record, tasks)
            moved = await gateway.run(_PROMOTE, [partition.due, partition.ready, *records], [*tasks, *kept])
            to_lists = moved < len(tasks)  # or another worker was faster
    wait = None if wait_ms < 0 else wait_ms / 1000
    if admit is not None and (to_lists or look_ms >= 0):
        look = await admit(partition, 0.0 if to_lists else look_ms / 1000)
        wait = look if wait is None else wait if look is None else min(wait, look)
    if renew_kept is not None and kept_ms >= 0:
        again = kept_ms / 1000 if kept_ms else await renew_kept(partition)
        wait = again if wait is None else min(wait, again)
    return moved, 0.0 if len(ids) == _BATCH else wait


async def next_look(gateway: Gateway, partition: Partition) -> float | None:
    """Return the seconds until tasks that wait for limits have their turn, 0 for now; None if none waits."""
    _, _, look_ms, _ = await gateway.run(_DUE, [partition.due, partition.rings], [1])
    return None if look_ms < 0 else look_ms / 1000


async def wake_version(
    gateway: Gateway, partition: Partition, tasks: Mapping[str, int] | None = None, most: int | None = None
) -> int:
    """Make tasks due that wait for a worker of this version, a bounded number per script. Return their number.

    The caller promotes them: no worker is woken.

    Args:
        tasks: Versions of the worker's tasks, by name; those of version 1 may be left out.
        most: Largest number of tasks that wait for a data format, and for a version of each task's code; None: all.
    """
    known = {} if tasks is None else tasks
    keys = [partition.due, partition.versions, *map(partition.task_versions, known)]
    if most is not None:
        return int(await gateway.run(_WAKE, keys, [min(most, _BATCH), DATA_FORMAT, *known.values()]))
    woken = 0
    for _ in range(_MAX_WAKES):
        now: int = await gateway.run(_WAKE, keys, [_BATCH, DATA_FORMAT, *known.values()])
        woken += now
        if now == 0:
            break
    return woken
