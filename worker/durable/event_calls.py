"""Calls that log an event once, however often the handler runs, and the event of steps that it did not ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.event_log import find_event
from ...queues.json_form import encodable
from ...queues.transport.backoff import retry_while_unavailable
from ..log import log_wait, logger
from .journal.event import Event
from .journal.event_redaction import redacted
from .journal.parsing import parse_event
from .journal.run_events import Orphaned
from .journal.step_record import StepRecord
from .run import Run
from .steps.current import check_call
from .steps.matching import digest_of, match_call, read_recorded_steps

_MAX_ORPHANS: Final = 20
"""Keys of an `orphaned` event."""


E = TypeVar("E", bound=Event)


async def log_once(
    run: Run,
    event: E,
    *,
    name: str | None = None,
    check: Callable[[], None] | None = None,
    also: Callable[[E], Sequence[Entry]] | None = None,
) -> tuple[int, E]:
    """Log an event unless an earlier run has logged it.

    Events of one type are matched by their content, then by order: see `match_call`. The event is stored with the next
    write, and always before the outcome.

    Args:
        name: Name of the record, else `#TYPE`.
        check: Called before the event is logged, unless an earlier run has logged it.
        also: Returns further entries of the act that logs it, given the event without secrets.

    Returns:
        Number of the event, and the event as it is in the log: an earlier run may have logged another content.

    Raises `StepOutsideTask`, `LeaseLost`.
    """
    name = f"#{event.type}" if name is None else name
    await check_call(run, name, own=True)
    if event.step is None and (outer := run.keys.within) is not None:
        event = event.model_copy(update={"step": outer})
    new = not run.history.records
    content = event if run.redact is None or (new and also is None) else redacted(event, run.redact)
    if new:
        if check is not None:
            check()
        key, entry = run.keys.next(name), run.next_entry(event)
    else:
        key, recorded, former = await match_call(run, name, digest_of(content.to_json()))
        if former is not None:
            recorded = StepRecord.decode(former).result
        if recorded is not None:
            run.replayed(int(recorded))
            return int(recorded), encodable(event) if former is None else await _logged(run, int(recorded), event)
        if check is not None:
            check()
        entry = run.next_entry(event)
    record = StepRecord(entry.value, digest_of(entry.log)).encode()
    more = () if also is None else also(content)
    await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), entry, *more, wait=False)
    return int(entry.value), encodable(event)


async def _logged(run: Run, number: int, event: E) -> E:
    """Return the event that the log has under a number; the given one if it has left the log."""
    await run.flush()  # a former call of this run may have logged it
    read = partial(find_event, run.gateway, run.delivery.partition, run.id, number)
    found = await retry_while_unavailable(read, on_wait=log_wait(f"the log of task {run.id}", run.touch))
    typed = None if found is None else parse_event(found)
    return typed if isinstance(typed, type(event)) else event


async def log_orphans(run: Run) -> str | None:
    """Log the recorded steps that the run has not asked for, and return a text if there are any. Raises `LeaseLost`."""
    orphans = run.keys.unasked(await read_recorded_steps(run))
    if not orphans:
        return None
    some = ", ".join(map(repr, orphans[:3]))
    problem = (
        f"the handler did not ask for {len(orphans)} of its recorded steps, such as {some}: "
        "they were renamed or removed, or called with other arguments"
    )
    logger.bind(task=run.envelope.task, id=run.id).warning("{}", problem)
    await run.log_event(Orphaned(steps=tuple(orphans[:_MAX_ORPHANS]), count=len(orphans)))
    return problem
