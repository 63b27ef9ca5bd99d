"""Calls of tools that a crash left without a result get one, in the state and in the log."""

from __future__ import annotations

import hashlib
from typing import Final

from ....queues import Entry, Kind
from ...durable import Run
from ...journal import AgentState
from ...journal.events import Repaired
from ...observe import logger
from .exchanges import completed, insertions, repair_of

__all__ = ["repair"]

_RECORD: Final = b"{}\nnull"


async def repair(run: Run, state: AgentState) -> tuple[str, ...]:
    """Give every call of the conversation a result; returns the ids of those that had none.

    The log is told once of each set of calls: a former run of the same handler may have told it. Raises `LeaseLost`.
    """
    missing = insertions(state.messages)
    if not missing:
        return ()
    calls = tuple(call.id for _, call in missing)
    place = f"{len(state.messages)}:{calls}"
    key = f"{run.keys.scope}#repaired:{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}"
    if key not in run.history.done:
        event = Repaired(calls=calls, changes=repair_of(state.messages), step=run.keys.within)
        await run.recorder.put(Entry(Kind.MARK, key, _RECORD), run.number(event), wait=True)
        run.history.done[key] = _RECORD
        logger.warning("Task {}: no result is known of {} calls of tools: {}", run.id, len(calls), ", ".join(calls))
    if insertions(state.messages):  # no session keeps this state, which would have heard of the event
        state.messages[:] = completed(state.messages)
    return calls
