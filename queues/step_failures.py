"""Recorded failures of steps: how a step record shows that it is one, and their removal from a checkpoint.

A failed step has a record as a finished one has, the field `d:KEY`. So the handler of a resumed run is given the same
failure. A replay may drop these records, so that the steps are called again.
"""

from __future__ import annotations

from typing import Final

import orjson

from .delivery.checkpoint import edit_checkpoint, read_position
from .keys import Partition
from .records import State
from .transport.gateway import Gateway
from .transport.large_values import SCAN_START, scan_page

FAILURE_HEAD: Final = b'{"f":'
"""First bytes of the record of a failure."""

DROPPED: Final = "failures_dropped"
"""Type of the event that failures were dropped."""

_PAGE: Final = 1000
_NAMED: Final = 20
"""Steps that the event names."""

_NO_WAIT: Final = "#"
"""Kind of wait that no task has: nothing is woken."""


async def drop_failures(gateway: Gateway, partition: Partition, task_id: str) -> bool:
    """Drop the failures from the checkpoint of a dead letter, in one act, with an event.

    Return False if the task is no dead letter any more.

    Raises `DecryptionError`.
    """
    position = await read_position(gateway, partition, task_id)
    if position.state is not State.DEAD:
        return False
    failed = await _failed_steps(gateway, partition, task_id)
    if not failed:
        return True
    event = (DROPPED, orjson.dumps({"steps": failed[:_NAMED], "count": len(failed)}))
    fields = [f"d:{step}" for step in failed]
    edited = await edit_checkpoint(
        gateway, partition, task_id, position, event=event, fields={}, dropped=fields, wakes=_NO_WAIT
    )
    return edited is not None


async def _failed_steps(gateway: Gateway, partition: Partition, task_id: str) -> list[str]:
    """Return the keys of the steps whose record is a failure, sorted."""
    cipher = gateway.encryptor.of(partition, task_id)
    failed: set[str] = set()
    cursor = SCAN_START
    while not cursor.is_end:
        cursor, fields = await scan_page(gateway, partition.steps(task_id), cursor, "d:*", _PAGE)
        for name, value in fields.items():
            field = name.decode("utf-8", "replace")
            if cipher.decrypt(field, value).startswith(FAILURE_HEAD):
                failed.add(field.removeprefix("d:"))
    return sorted(failed)
