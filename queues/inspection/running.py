"""The running tasks of partitions, from their pending lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..envelope import Envelope
from ..errors import Refused, UnreadableEnvelope
from ..keys import GROUP, Partition, is_reserved
from ..records import Record, State, read_records
from ..transport import Gateway, is_missing_group, pairs

__all__ = ["running_tasks"]


async def running_tasks(gateway: Gateway, partitions: Sequence[Partition], most: int) -> list[Record]:
    """Return running tasks, those with the oldest messages first: at most `most`, of at most `most` per worker."""
    found = await asyncio.gather(*(_of_partition(gateway, partition, most) for partition in partitions))
    records = [record for some in found for record in some]
    return sorted(records, key=lambda record: record.started_at or record.enqueued_at or 0)[:most]


async def _of_partition(gateway: Gateway, partition: Partition, most: int) -> list[Record]:
    try:
        *_, holders = await gateway.command("XPENDING", partition.ready, GROUP)
    except Refused as error:
        if not is_missing_group(error):
            raise
        return []  # no worker has come yet
    workers = [name for name, _ in holders or () if not is_reserved(name.decode())]
    pending = await gateway.pipeline(
        [("XPENDING", partition.ready, GROUP, "-", "+", most, worker) for worker in workers]
    )
    entries = [entry for some in pending for entry, *_ in some]
    messages = await gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry in entries])
    ids = [task_id for message in messages if message and (task_id := _task_id(pairs(message[0][1])))]
    records = await read_records(gateway, partition, ids)
    return [record for record in records if record is not None and record.state is State.RUNNING]


def _task_id(fields: dict[bytes, bytes]) -> str | None:
    try:
        return Envelope.decode(fields.get(b"env", b"")).id
    except UnreadableEnvelope:
        return None
