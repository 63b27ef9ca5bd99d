"""Removing everything of a namespace that was made for the occasion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...queues import Gateway, Namespace, Partition

__all__ = ["remove_namespace"]

_AT_ONCE: Final = 1_000


async def remove_namespace(gateway: Gateway, namespace: Namespace, partitions: Iterable[Partition]) -> None:
    """Remove all keys of the namespace, which has these partitions and no others.

    They are sought through a whole server, in small steps that keep nobody waiting; in a cluster, through each node
    that has some of them.
    """
    if not gateway.clustered:
        await _remove(gateway, f"{{{namespace.name}[:}}]*", namespace.queues)
        return
    await _remove(gateway, f"{{{namespace.name}}}:*", namespace.queues)
    for partition in partitions:
        await _remove(gateway, f"{partition.ready.removesuffix('ready')}*", partition.ready)


async def _remove(gateway: Gateway, pattern: str, node_of: str) -> None:
    cursor = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE)
        cursor, keys = await gateway.command(*scan, node_of=node_of)
        await gateway.pipeline([("UNLINK", key) for key in keys])
        if cursor == b"0":
            return
