"""The event log of a task, read from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from .gateway import Gateway
from .keys import Partition
from .records import opened_error, pairs
from .sealing import Seal, is_sealed

__all__ = ["TaskEvent", "read_events"]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task. `at`: milliseconds of Redis' clock since the epoch."""

    id: str
    at: int
    type: str
    step: str | None
    data: Any

    def summary(self) -> dict[str, Any]:
        """The event as plain data, for programs."""
        return {"id": self.id, "at": self.at, "type": self.type, "step": self.step, "data": self.data}


async def read_events(
    gateway: Gateway, partition: Partition, task_id: str, *, after: str = "0-0", limit: int = 10_000
) -> list[TaskEvent]:
    """Events after an event id, oldest first."""
    entries = await gateway.command("XRANGE", partition.log(task_id), f"({after}", "+", "COUNT", limit)
    seal = gateway.sealer.of(partition, task_id)
    return [_event(entry_id, pairs(fields), seal) for entry_id, fields in entries]


def _event(entry_id: bytes, fields: dict[bytes, bytes], seal: Seal) -> TaskEvent:
    data = fields.get(b"data")
    step = fields.get(b"step")
    return TaskEvent(
        id=entry_id.decode(),
        at=int(entry_id.partition(b"-")[0]),
        type=fields[b"type"].decode(),
        step=None if step is None else step.decode(),
        data=None if not data else opened_error(seal, data) if is_sealed(data) else orjson.loads(data),
    )
