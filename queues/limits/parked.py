"""Parked tasks that wait for a limit: a call of their handler found no room in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ..envelope import TASK_ID_PATTERN
from ..keys import Namespace, Partition, is_name
from ..transport.gateway import Gateway
from ..transport.scripts import queue_script

_WAKE: Final = queue_script("wake_for_limit")

_ATTENDED: Final = 2
"""Reply for a task that was woken, and whose partition has a worker."""

_WAITER: Final = re.compile(f"([^/]+)/([0-9]{{1,9}})/task:({TASK_ID_PATTERN[1:-1]})")


def parked_waiter(partition: Partition, task_id: str) -> str:
    """Return the waiter of a parked task, which a release returns as a hint."""
    return f"{partition.queue}/{partition.index}/task:{task_id}"


def parked_task(namespace: Namespace, waiter: str) -> tuple[Partition, str] | None:
    """Return the parked task that a waiter is for, None for any other waiter."""
    found = _WAITER.fullmatch(waiter)
    if found is None or not is_name(found[1]):
        return None
    return namespace.partition(found[1], int(found[2])), found[3]


async def wake_for_limit(gateway: Gateway, partition: Partition, task_id: str) -> bool:
    """Wake a task that is parked for a limit, and return whether it was. A run that waits in memory asks again."""
    return bool(await _wake(gateway, partition, task_id))


async def _wake(gateway: Gateway, partition: Partition, task_id: str) -> int:
    keys = [partition.due, partition.nudge, partition.record(task_id), partition.promote_lock]
    woken: int = await gateway.run(_WAKE, keys, [task_id])
    return woken


async def wake_parked(gateway: Gateway, namespace: Namespace, hints: Sequence[str]) -> int:
    """Wake the parked tasks among the waiters that a release returned; return how many of them a worker will resume."""
    resumed = 0
    for hint in hints:
        if (found := parked_task(namespace, hint)) is not None:
            resumed += await _wake(gateway, *found) == _ATTENDED
    return resumed
