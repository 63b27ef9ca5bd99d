"""Final state of a run: waits until every task has ended, then writes their records to the journal."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any, Final

import orjson
from perdure import Producer
from perdure.queues import Partition, Record, list_queues, list_tasks
from perdure.queues.stream_items import decode_item, stream_names
from perdure.queues.transport.large_results import recorded_results
from perdure.worker.agents.journal.history import state_at

from .agents import state_step
from .instrumentation import token_of
from .journal import JournalWriter
from .kinds import KINDS

__all__ = ["note_finals", "settle_down"]

_TOKEN: Final = re.compile(rb'"\d+\.\d+/')
"""Begin of the value of a step."""


async def settle_down(producer: Producer, patience: float) -> bool:
    """Wait at most so many seconds until no task is queued, waits or runs; return whether that happened."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        queues = await list_queues(producer.gateway, producer.namespace)
        if not any(queue.depth + queue.in_flight + queue.due + queue.limited for queue in queues):
            return True
        await asyncio.sleep(0.3)
    return False


async def note_finals(producer: Producer, folder: Path, journal: JournalWriter) -> None:
    """Write one line per task that has a record, and one per ledger of a payment."""
    async for record in list_tasks(producer.gateway, producer.namespace):
        if record.task not in KINDS:
            continue  # the turn of a session
        partition = producer.namespace.partition(record.queue, record.partition)
        key = partition.record(record.id)
        if KINDS[record.task].streams:
            await _note_streams(producer, partition, record.id, journal)
        commands = [("TIME",), ("PTTL", key)]
        time_now, ttl_ms = await producer.gateway.pipeline(commands, node_of=key)
        now_ms = int(time_now[0]) * 1000 + int(time_now[1]) // 1000
        kept = None if record.finished_at is None else (now_ms + ttl_ms - record.finished_at) / 1000
        if record.task == "agent":
            state = await _state_of_agent(producer, partition, record.id)
            steps = {state_step(step): token for step, token in state["results"].items()}
            turns = [turn["content"] for turn in state["messages"]]
        else:
            steps, turns = await _steps(producer, partition, record.id), []
        more = {"conversation": turns, "unread": record.unused, "kept": kept, "spot": _spot(record)}
        journal.write("final", **_final(record, steps), **more)
    for ledger in sorted((folder / "ledger").iterdir()):
        task, _, _ = ledger.name.rpartition("-")
        journal.write("ledger", task=task, tokens=ledger.read_text().splitlines())


async def _note_streams(producer: Producer, partition: Partition, task_id: str, journal: JournalWriter) -> None:
    """Write one line per stream of a task, with all that is stored."""
    names = stream_names(await producer.gateway.command("HGET", partition.record(task_id), "streams"))
    for name in names:
        found = await producer.gateway.command("XRANGE", partition.stream(task_id, name), "-", "+")
        entries = []
        for entry, fields in found:
            item = decode_item(entry, fields)
            shown = {"number": item.number, "unit": item.unit, "attempt": item.attempt, "key": item.key}
            value = orjson.loads(item.data) if item.data and not item.is_notice else None
            entries.append({**shown, "cut": item.cut.decode(), "value": value})
        journal.write("stream", task=task_id, stream=name, entries=entries)


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


async def _steps(producer: Producer, partition: Partition, task_id: str) -> dict[str, str]:
    """Return recorded values by step: the second line of a record is the value. Waits and children are no steps."""
    found = await recorded_results(producer.gateway, partition, task_id)
    values = {step: record.partition(b"\n")[2] for step, record in found.items()}
    return {step: token_of(orjson.loads(value)) for step, value in values.items() if _TOKEN.match(value)}


def _spot(record: Record) -> str | None:
    """Return the spot of a child, from its arguments."""
    if not record.args:
        return None
    spot = orjson.loads(record.args).get("spot")
    return None if spot is None else str(spot)


async def _state_of_agent(producer: Producer, partition: Partition, task_id: str) -> dict[str, Any]:
    """Return an agent's state: the reduction of its log, which is read as far as it can be."""
    return (await state_at(producer.gateway, partition, task_id, lenient=True)).state
