"""Joins that are open, as operators and callers who cancel a parent see them. What a join is: see `joins.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from .keys import Namespace, Partition
from .transport.gateway import Gateway
from .transport.pipelining import Argument, Command
from .transport.scripts import queue_script

_CLOSE: Final = queue_script("close_join")

LATE_MS: Final = 1_200_000
"""Milliseconds for which children are refused that are added to a join after its end."""

_PAGE: Final = 500
"""Children that are read at once."""

_SHOWN: Final = 20
"""Joins of a parked task that are read."""


class JoinProgress(NamedTuple):
    """The progress of a join.

    failed: first child that died, if that ends the join. open: a child that has not ended.
    """

    total: int
    ended: int
    failed: str | None = None
    open: str | None = None


def awaited_joins(wakes: str) -> list[str]:
    """Return the names of the joins that a parked task waits for. wakes: that field of its record, see park.lua."""
    return [word.split(":")[1] for word in wakes.split() if word.startswith("join:")]


async def read_progress(gateway: Gateway, partition: Partition, task_id: str) -> list[JoinProgress]:
    """Return the progress of the joins that a parked task waits for."""
    wakes = await gateway.command("HGET", partition.record(task_id), "wakes")
    found: list[JoinProgress] = []
    for group in awaited_joins((wakes or b"").decode())[:_SHOWN]:
        join, launched, _ = partition.join_keys(task_id, group)
        reads: list[Command] = [("HMGET", join, "total", "ended", "failed"), ("SSCAN", launched, 0, "COUNT", 1)]
        known, (_, children) = await gateway.pipeline(reads)
        total, ended, failed = known
        if total is None:
            continue
        child = children[0] if children else None
        place = None if child is None else await gateway.command("HGET", join, f"p:{child.decode()}")
        open_child = child if place is None else place.split(b" ")[2]
        names = [name and name.decode() for name in (failed, open_child)]
        found.append(JoinProgress(int(total), int(ended or 0), *names))
    return found


async def stop_join(
    gateway: Gateway, partition: Partition, task_id: str, group: str
) -> Sequence[tuple[Partition, str]]:
    """Let a join launch nothing more. Return its open children, which the parent has spawned and which were launched.

    The parent, or a janitor, closes the join later.
    """
    join, launched, waiting = partition.join_keys(task_id, group)
    keys = [join, launched, waiting, partition.joins]
    if not await gateway.run(_CLOSE, keys, [f"{task_id}:{group}", "close", LATE_MS]):
        return ()
    found: list[tuple[Partition, str]] = []
    cursor: Argument = 0
    while True:
        cursor, children = await gateway.command("SSCAN", launched, cursor, "COUNT", _PAGE)
        if children:
            places = await gateway.command("HMGET", join, *(f"p:{child.decode()}" for child in children))
            for place in places:
                queue, index, child, *watched = ("", "0", "", "") if place is None else place.decode().split(" ")
                if not watched:
                    found.append((Namespace(partition.namespace).partition(queue, int(index)), child))
        if int(cursor) == 0:
            return found
