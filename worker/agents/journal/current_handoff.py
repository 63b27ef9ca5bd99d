"""Handoff document of a task for people: the stored one if it is up to date, else one made from the event log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....queues.event_log import LogTail, read_log_tail
from ....queues.handle import TaskHandle
from ....queues.producer import Producer
from ....queues.records import Record, State
from ...defined_secrets import mask_defined
from ...durable.journal.handoff.document import HANDOFF, RECEIVED, Handoff, Why
from ...durable.journal.tool_notes import call_text
from ...durable.stop_reasons import STOP_RULES, StopReason, stop_of_event
from ...errors import BadHandoff
from .draft import burial_notes, handoff_of


async def current_handoff(producer: Producer, handle: TaskHandle[Any], problems: list[str]) -> Handoff:
    """Return the handoff document of a task.

    Args:
        problems: Receives why the stored document cannot be read, if it cannot.
    """
    record = (await mask_defined(producer))(await handle.record())
    tail = await read_log_tail(producer.gateway, handle.partition, handle.id)
    stored = _stored(tail, record.id, HANDOFF, problems)
    if stored is not None and stored.events == tail.number and record.state is not State.RUNNING:
        return stored
    step = () if record.step is None or record.state is not State.RUNNING else (record.step,)
    why = _why(tail, record)
    goal = call_text(record.task or "?", record.shown_arguments() or b"{}")
    notes: Iterable[str] = ()
    if why == "burial":
        error = record.error or {}
        texts = [str(error.get(name, "")) for name in ("error", "message")]
        notes = burial_notes(tail.events, record.id, record.reason or "", *texts, intents=tail.intents)
    made = handoff_of(
        tail, task=record.task or "?", session=record.id, why=why, goal=goal, in_flight=step, attention=notes
    )
    at = tail.events[-1].at if tail.events else tail.now
    return made if why == "asked" else made.model_copy(update={"at": record.finished_at or at})


async def received_handoff(producer: Producer, handle: TaskHandle[Any], problems: list[str]) -> Handoff | None:
    """Return the document that a task received from the one that it continues; None if it continues none."""
    tail = await read_log_tail(producer.gateway, handle.partition, handle.id)
    return _stored(tail, handle.id, RECEIVED, problems)


def _why(tail: LogTail, record: Record) -> Why:
    if record.state is State.SUCCEEDED:
        return "finished"
    if record.state is State.DEAD:
        return "burial"
    last = tail.events[-1].type if tail.events else ""
    stop = stop_of_event(last)
    if stop in (StopReason.LOST, StopReason.FAILED, StopReason.RELEASED):
        return STOP_RULES[stop].why or "asked"
    return "asked"


def _stored(tail: LogTail, task_id: str, key: str, problems: list[str]) -> Handoff | None:
    data = tail.saved.get(key)
    if data is None:
        return None
    try:
        return Handoff.from_json(task_id, data)
    except BadHandoff as error:
        problems.append(str(error))
        return None
