"""What tasks have saved in their checkpoints under names that begin alike; of one task, or of all that are kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from .gateway import Gateway
from .inspection import queue_partitions, walks
from .keys import Namespace, Partition
from .records import pairs

__all__ = ["saved_fields", "saved_fields_of_all"]

_PAGE: Final = 500
"""Keys, and fields of a hash, that are asked for at once."""

_STEPS: Final = ":steps"


async def saved_fields(gateway: Gateway, partition: Partition, task_id: str, beginning: str) -> dict[str, bytes]:
    """By name, what a task has saved. beginning: of the names. Raises `CannotOpen`."""
    found = await _fields(gateway, [partition.steps(task_id)], beginning)
    return _opened(gateway, partition, task_id, found[partition.steps(task_id)])


async def saved_fields_of_all(
    gateway: Gateway, namespace: Namespace, beginning: str
) -> AsyncIterator[tuple[Partition, str, dict[str, bytes]]]:
    """Of every task that has a checkpoint: its partition, its id, and by name what it has saved, often nothing.

    Found by SCAN: a task that is there from the beginning to the end is found, one may be found twice, and no key is
    locked. What is there in other fields is not read. Raises `CannotOpen`.
    """
    partitions = await queue_partitions(gateway, namespace)
    for pattern, only, node in walks(gateway, namespace, None, partitions):
        known = {partition.records.removesuffix("*"): partition for partition in only}
        cursor = b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", pattern + _STEPS, "COUNT", _PAGE, "TYPE", "hash")
            cursor, keys = await gateway.command(*scan, node_of=node)
            for key, saved in (await _fields(gateway, [key.decode() for key in keys], beginning)).items():
                head, marker, rest = key.partition(":task:")
                if (partition := known.get(head + marker)) is not None:
                    task_id = rest.removesuffix(_STEPS)
                    yield partition, task_id, _opened(gateway, partition, task_id, saved)
            if cursor == b"0":
                break


async def _fields(gateway: Gateway, keys: list[str], beginning: str) -> dict[str, dict[bytes, bytes]]:
    """By key, the fields whose names begin so. Each round asks all of the hashes that are not read to their end."""
    found: dict[str, dict[bytes, bytes]] = {key: {} for key in keys}
    cursors: dict[str, Any] = dict.fromkeys(keys, b"0")
    pattern = f"s:{beginning}*"
    while cursors:
        asked = [("HSCAN", key, cursor, "MATCH", pattern, "COUNT", _PAGE) for key, cursor in cursors.items()]
        for key, (cursor, flat) in zip(list(cursors), await gateway.pipeline(asked), strict=True):
            found[key].update(pairs(flat))
            if cursor == b"0":
                del cursors[key]
            else:
                cursors[key] = cursor
    return found


def _opened(gateway: Gateway, partition: Partition, task_id: str, fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    seal = gateway.sealer.of(partition, task_id)
    return {
        (name := field.removeprefix(b"s:").decode()): seal.open(f"s:{name}", value) for field, value in fields.items()
    }
