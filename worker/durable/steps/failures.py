"""Failures of steps as history: what of them is stored, and when.

The last failure of a step is stored when it happens, with its event, and counts for nothing yet. It is handled once an
asyncio task that received it, or the handler's own, makes another recorded call: that is stored, and confirmed, before
the call starts, since what the handler does from there on may follow from the failure. A resumed run raises it again.

If the attempt ends in failure, or asks for another run, the failures that are not handled are dropped with its last
entries: the next attempt calls these steps again, with all tries. Failed tries that others follow are counted in the
same place, so that a resumed run makes only those that are left.

A step that its caller has cut off is not stored before the handler continues: until then a crash, or the end of the
worker, may as well have cut it off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import anyio

from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.errors import (
    DecryptionError,
    EntriesLost,
    LargeValueLost,
    LeaseLost,
    PayloadTooLarge,
    Unavailable,
    UnreadableCheckpoint,
)
from ...errors import (
    Reschedule,
    ResultMismatch,
    StateError,
    StepDefinitionError,
    StepInDoubt,
    StepMismatch,
    StepOutsideTask,
    StepResolvedAsFailed,
    TaskDefinitionError,
    UnserialisableResult,
)
from ...log import logger
from ..journal.failure_record import FailureRecord, FailureState
from ..run import Run
from .keys import forget_steps
from .recorded_errors import describe, make_error

_NO_FAILURES: Final = (
    DecryptionError,
    EntriesLost,
    LargeValueLost,
    LeaseLost,
    PayloadTooLarge,
    Reschedule,
    ResultMismatch,
    StateError,
    StepDefinitionError,
    StepInDoubt,
    StepMismatch,
    StepOutsideTask,
    StepResolvedAsFailed,
    TaskDefinitionError,
    Unavailable,
    UnreadableCheckpoint,
    UnserialisableResult,
)
"""Errors that say nothing about what the step did: of its definition, its record or the run, and requests."""


class ReceivedFailure:
    """A failure that this run has seen, from which nothing has followed yet.

    Attributes:
        record: The failure; CUT_OFF for a step that was cut off.
        tasks: The asyncio tasks that received it: the one that ran the step, and the one that called it.
        stored: Whether it is in the checkpoint, or will be with the next write.
        handled: Whether it was put into the checkpoint as handled.
        held: Whether no call handles it: a method of an agent has failed with it.
    """

    __slots__ = ("handled", "held", "record", "stored", "tasks")

    def __init__(self, record: FailureRecord, caller: asyncio.Task[Any] | None, *, stored: bool) -> None:
        self.record = record
        self.tasks = (asyncio.current_task(), caller)
        self.stored = stored
        self.handled = self.held = False


def note_failure(
    run: Run,
    key: str,
    error: Exception,
    call: tuple[str, str],
    tries: int,
    caller: asyncio.Task[Any] | None,
    *,
    again: bool,
    kept: Sequence[Entry],
) -> list[Entry]:
    """Return the entries that store a failed try, to be put with its event; none for an error that is no failure.

    Args:
        call: Hash and text of the arguments.
        tries: Tries that have ended.
        caller: The asyncio task that called the step.
        again: Whether another one follows.
        kept: Entries that store again what the record of a step deletes, and this one must not.
    """
    if run.stopped or isinstance(error, _NO_FAILURES):
        return []
    message = run.delivery.entry.decode()
    if again:
        record = FailureRecord(FailureState.OPEN, tries, *call, message=message)
    else:
        text, described = describe(error, run.payload_limit)
        record = FailureRecord(FailureState.FAILED, tries, *call, text, described, message)
    _received(run)[key] = ReceivedFailure(record, caller, stored=True)
    return [Entry(Kind.DONE_WITH_EVENT, key, record.encode()), *kept]


def note_cut_off(run: Run, key: str, digest: str, shown: str, caller: asyncio.Task[Any] | None) -> None:
    """Note that the caller of a step has cancelled it, and not the run."""
    if not run.stopped:
        record = FailureRecord(FailureState.CUT_OFF, 0, digest, shown)
        _received(run)[key] = ReceivedFailure(record, caller, stored=False)


def _received(run: Run) -> dict[str, Any]:
    if run.failures is None:
        run.failures = {}
    return run.failures


async def handle_failures(run: Run) -> None:
    """Store the failures that the running asyncio task has received as handled: it makes another recorded call.

    The handler's own task has received those of all others. A failure that another call is just storing is waited for.
    Raises `LeaseLost`, `EntriesLost`.
    """
    task = asyncio.current_task()
    found = {
        key: failure
        for key, failure in (run.failures or {}).items()
        if (task is run.task or task in failure.tasks)
        and not failure.held
        and failure.record.state is not FailureState.OPEN
    }
    if not found:
        return
    entries: list[Entry] = []
    for key, failure in found.items():
        if not failure.handled:
            failure.handled = True
            entries += _handled(run, key, failure)
    if entries:
        await run.recorder.put(*entries, wait=True, progress=True)
        run.progressed()
    else:
        await run.flush()
    if run.failures is not None:
        for key, failure in found.items():
            if run.failures.get(key) is failure:
                del run.failures[key]
    await run.check_stopped()


def _handled(run: Run, key: str, failure: ReceivedFailure) -> list[Entry]:
    """Return the entries that store a failure as handled, and drop the parts of its step.

    The intent of a risky step goes: it has failed, which leaves no doubt. If it was cut off, the doubt stays.
    """
    record, history = failure.record, run.history
    if record.state is FailureState.FAILED:
        record = replace(record, state=FailureState.HANDLED, message="")
    parts = forget_steps(run.keys.under(f"{key}/", history), history)
    data = record.encode()
    if any(key.startswith(f"{outer}/") for outer in run.steps_in_flight):  # for the next try of the outer step
        history.done[key] = data
    intent = history.intents.get(key)
    kept = []
    if intent is not None and record.state is FailureState.CUT_OFF:
        kept = [Entry(Kind.INTENT, key, intent)]
    else:
        history.intents.pop(key, None)
    history.saved.pop(key, None)
    return [Entry(Kind.DONE_WITH_EVENT, key, data), *kept, *parts]


def kept_entries(run: Run, key: str, note: Entry | None = None) -> list[Entry]:
    """Return entries that store again what the record of a step deletes: its intent, and its saved progress."""
    intent, saved = run.history.intents.get(key), run.history.saved.get(key)
    kept = [] if intent is None else [Entry(Kind.INTENT, key, intent)]
    if note is not None:
        kept.append(note)
    return kept if saved is None else [*kept, Entry(Kind.SAVED, key, saved)]


def hold_failures(run: Run, scope: str) -> None:
    """Let no later call handle the failures in a scope: the method of an agent that called the steps has failed."""
    for key, failure in (run.failures or {}).items():
        if key.startswith(scope):
            failure.held = True


def drop_failures(run: Run, scope: str = "") -> list[Entry]:
    """Forget the failures that are not handled, and return the entries that drop them from the checkpoint.

    scope: prefix of the keys.
    """
    return [entry for key, failure in _forgotten(run, scope) if failure.stored for entry in _dropped(run, key)]


def _forgotten(run: Run, scope: str = "") -> list[tuple[str, ReceivedFailure]]:
    """Forget the failures that are not handled, and return them by key."""
    received = run.failures or {}
    found = [(key, failure) for key, failure in received.items() if key.startswith(scope) and not failure.handled]
    for key, _ in found:
        del received[key]
        run.history.done.pop(key, None)
    return found


def _dropped(run: Run, key: str) -> list[Entry]:
    return [Entry(Kind.DROP, key, b""), *kept_entries(run, key)]


async def forget_failures(run: Run) -> None:
    """Drop the failures that are not handled, with the next write: an attempt ends, and a next one calls the steps.

    If the worker dies between that write and the outcome, the attempt is resumed, and calls each of these steps once
    more. So of a step with several tries, all but the last one stay counted; they count for this message only.

    Raises `LeaseLost`, `EntriesLost`.
    """
    entries: list[Entry] = []
    for key, failure in _forgotten(run):
        record = failure.record
        if not failure.stored:
            continue
        if record.tries == 1:
            entries += _dropped(run, key)
        elif record.state is FailureState.FAILED:
            less = replace(record, state=FailureState.OPEN, tries=record.tries - 1, text="", error=None)
            entries += [Entry(Kind.DONE_WITH_EVENT, key, less.encode()), *kept_entries(run, key)]
    if entries:
        await run.recorder.put(*entries, wait=False)


def calls_again(run: Run, data: bytes) -> bool:
    """Return whether a step with this failure on record is called again; see `meet_failure`."""
    record = FailureRecord.decode(data)
    if record.state is FailureState.FAILED:
        return record.message != run.delivery.entry.decode()
    return record.state is FailureState.OPEN


async def meet_failure(run: Run, key: str, data: bytes, caller: asyncio.Task[Any] | None) -> int:
    """Raise the recorded failure of a step again. Return how many tries have ended if it is called again.

    It is if others follow, or if the failure has ended an earlier attempt. A step that was cut off is not called: the
    caller cuts it off again.
    """
    record = FailureRecord.decode(data)
    run.touch()
    if record.state in (FailureState.OPEN, FailureState.FAILED):
        if record.message != run.delivery.entry.decode():
            return 0
        _received(run)[key] = ReceivedFailure(record, caller, stored=True)
    if record.state is FailureState.OPEN:
        return record.tries
    if record.state is FailureState.CUT_OFF:
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.debug("step {} was cut off by its caller; it waits until that happens again", key)
        await anyio.sleep_forever()
    raise make_error(key, record.text, record.error or {})
