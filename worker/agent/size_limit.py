"""Parking of an agent whose state or result is too large, until an operator has compacted it or raised the limit."""

from __future__ import annotations

from typing import Any, NoReturn

import orjson

from ...queues.defaults import LONGEST
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import PayloadTooLarge
from ..durable.run import Run
from ..durable.stop_reasons import ParkReason
from ..errors import StateTooLarge
from ..journal.compaction import COMPACTION, TOO_LARGE
from ..journal.run_events import Waited, WaitStarted
from ..log import logger
from .live_state import LiveState


async def park_too_large(live: LiveState[Any], error: StateTooLarge | PayloadTooLarge) -> NoReturn:
    """Park the task, with the error in its log. What was recorded stays; the current step will run again.

    An agent whose inputs are too large has no state yet: only a higher limit lets it start.
    """
    run, why = live.run, str(error)
    if isinstance(error, PayloadTooLarge):
        why = f"{error} of the workers; then run: perdure task compact {run.id}"
    if live.started:
        live.rollback()
    else:
        why = _too_large_to_start(run.id, error)
    logger.bind(task=run.envelope.task, id=run.id).error("parked until its state is compacted: {}", why)
    note = {"size": error.size, "limit": error.limit, "setting": _setting(error)}
    saved = Entry(Kind.SAVED, TOO_LARGE, orjson.dumps(note))
    waiting = run.next_entry(WaitStarted(what=COMPACTION, why=why))
    snapshot = live.snapshot() if live.started else []
    await run.recorder.put(*live.take_ahead(), waiting, saved, *snapshot, wait=True)
    await _park(run)


def _too_large_to_start(task_id: str, error: StateTooLarge | PayloadTooLarge) -> str:
    largest = f"; largest fields: {error.largest}" if isinstance(error, StateTooLarge) else ""
    return (
        f"the goal and the inputs of task {task_id}, and what it continues from, take {error.size:,} bytes in its "
        f"state or its first event, the limit is {error.limit:,}{largest}. Raise PERDURE_{_setting(error).upper()} of "
        f"the workers, then run: perdure task compact {task_id}; or run: perdure task cancel {task_id}, and enqueue it "
        "with references to its large data"
    )


def _setting(error: StateTooLarge | PayloadTooLarge) -> str:
    return error.setting if isinstance(error, PayloadTooLarge) else "payload_limit"


async def resume_after_compaction(run: Run) -> None:
    """Park the task again if its state was too large and nothing has changed since, before anything is paid for twice.

    A compaction deletes the note of the size that was needed. A higher limit makes room for it.
    """
    data = run.history.saved.get(TOO_LARGE)
    if data is None:
        return
    note = orjson.loads(data)
    large = note.get("setting") == "large_limit"
    if note["size"] > (max(run.settings.largest_value, run.payload_limit) if large else run.payload_limit):
        await _park(run)
    del run.history.saved[TOO_LARGE]
    await run.recorder.put(run.next_entry(Waited()), Entry(Kind.DROP, TOO_LARGE, b""), wait=True)


async def _park(run: Run) -> NoReturn:
    await run.park(ParkReason(LONGEST, COMPACTION, run.history.mail))
