"""The end of a run: time for every task to end, then what the server holds of them, written into the journal."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import orjson
from perdure import Producer
from perdure.queues import Record, list_queues, list_tasks

from .journal import Pen

__all__ = ["note_finals", "settle_down"]


async def settle_down(producer: Producer, patience: float) -> bool:
    """Wait until nothing waits, runs or is due, for so many seconds at the most; whether that came."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        queues = await list_queues(producer.gateway, producer.namespace)
        if not any(queue.depth + queue.in_flight + queue.due for queue in queues):
            return True
        await asyncio.sleep(0.3)
    return False


async def note_finals(producer: Producer, folder: Path, pen: Pen) -> None:
    """One line per task that has a record, one per ledger of a payment."""
    async for record in list_tasks(producer.gateway, producer.namespace):
        partition = producer.namespace.partition(record.queue, record.partition)
        flat = await producer.gateway.command("HGETALL", partition.steps(record.id))
        pen.note("final", **_final(record, _steps(flat)))
    for ledger in sorted((folder / "ledger").iterdir()):
        task, _, _ = ledger.name.rpartition("-")
        pen.note("ledger", task=task, tokens=ledger.read_text().splitlines())


def _final(record: Record, steps: dict[str, str]) -> dict[str, object]:
    return {
        "task": record.id,
        "kind": record.task,
        "state": str(record.state),
        "attempts": record.attempts,
        "crashes": record.crashes,
        "replays": record.replays,
        "reason": record.reason,
        "error": (record.error or {}).get("error"),
        "message": str((record.error or {}).get("message"))[:200],
        "worker": record.worker,
        "result": orjson.loads(record.result) if record.result else None,
        "steps": steps,
    }


def _steps(flat: list[bytes]) -> dict[str, str]:
    """Recorded values by step: the second line of a record is the value."""
    found: dict[str, str] = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        kind, _, step = name.decode().partition(":")
        if kind == "d":
            found[step] = orjson.loads(value.partition(b"\n")[2])
    return found
