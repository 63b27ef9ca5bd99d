"""Giving a task up: one atomic act that takes the message away and leaves the dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson

from ..queues import ERROR, Counters, Delivery, Gateway, LeaseLost, Partition, load_script
from .evidence import Evidence
from .reasons import Reason

__all__ = ["DEFAULT_RETENTION", "bury", "trim_letters", "unreadable_id"]

DEFAULT_RETENTION: Final = 30 * 24 * 3600.0
"""Seconds for which a dead letter and its checkpoint are kept."""

_BURY = load_script(Path(__file__).parent / "lua" / "bury.lua")


def unreadable_id(delivery: Delivery) -> str:
    """The id under which a message that names none is buried."""
    return f"unreadable-{delivery.entry.decode()}"


async def bury(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    *,
    task: str,
    reason: Reason,
    evidence: Evidence,
    counters: Counters,
    retention: float = DEFAULT_RETENTION,
) -> None:
    """Make the task a dead letter and acknowledge its message. retention: seconds. Raises `LeaseLost`."""
    partition = delivery.partition
    keys = [
        partition.ready,
        partition.record(task_id),
        partition.steps(task_id),
        partition.log(task_id),
        partition.dead,
    ]
    letter = (
        task_id,
        task,
        str(reason),
        gateway.sealer.of(partition, task_id).close(ERROR, orjson.dumps(evidence.fields())),
        counters.attempts,
        counters.crashes,
    )
    raw = int(reason is Reason.UNREADABLE)
    if not await gateway.run(_BURY, keys, [*delivery.fence, *letter, round(retention * 1000), raw]):
        raise LeaseLost(task_id, "burial")


async def trim_letters(gateway: Gateway, partition: Partition, retention: float) -> int:
    """Drop dead letters past their retention (their records expire by themselves). Returns how many."""
    seconds, _ = await gateway.command("TIME", node_of=partition.dead)
    oldest = max(0, int(seconds) * 1000 - round(retention * 1000))
    return int(await gateway.command("XTRIM", partition.dead, "MINID", "=", oldest))
