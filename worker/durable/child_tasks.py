"""Tasks that a handler enqueues: recorded, so that a crash of the handler enqueues none of them twice.

Before the first try, the id is stored (a plan); after the task is stored, its place. A run that finds the plan enqueues
the task under the same id, which changes nothing if it is stored. A run that finds the place enqueues nothing, even if
the record of the task has expired meanwhile.

The records end with the attempt (attempt_end.py): a retry enqueues new tasks, unless the caller chooses their ids. In a
step, only the step is recorded: the ids follow from its key, the attempt and the try, so that a crash in the step
doubles no task, and another try of it enqueues new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import UUID

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.envelope import new_task_id
from ...queues.handle import TaskHandle
from ...queues.keys import Namespace, Partition
from .attempt_end import ENQUEUED, AttemptEnd, chunks_of
from .journal.step_record import StepRecord
from .run import Run
from .steps.codec import read_step_result, store_step_result
from .steps.current import CURRENT_RUN, CURRENT_STEP, Step, check_call
from .steps.matching import digest_of, match_call

R = TypeVar("R")

Ids = Callable[[int], str]
"""Returns the id of the task with this number in a call, from 0."""


class Enqueue(Protocol[R]):
    """Stores the tasks of a call; returns their handles.

    ids: None for ids of its own. planned: whether a task that has such an id is this one, whatever its arguments are.
    """

    def __call__(self, ids: Ids | None, *, planned: bool) -> Awaitable[Sequence[TaskHandle[R]]]: ...


class Opener(Protocol[R]):
    """Makes the handle of a stored task."""

    def __call__(self, task_id: str, partition: Partition, /) -> TaskHandle[R]: ...


def enqueuing_run() -> Run | None:
    """Return the run whose handler enqueues a task here; None outside of tasks, and where a run is being stopped.

    A thread that a handler has started itself may call from another event loop, where nothing can be recorded.
    """
    run = CURRENT_RUN.get()
    if run is None or run.closed or run.stopped:
        return None
    return run if CURRENT_STEP.get() is not None or run.runs_here else None


async def enqueue_once(
    run: Run, task: str, call: Callable[[], bytes], enqueue: Enqueue[R], open_handle: Opener[R], *, own_ids: bool
) -> Sequence[TaskHandle[R]]:
    """Enqueue tasks in a handler, or return the handles of those that an earlier run of the attempt has enqueued.

    Args:
        task: Name of the enqueued task.
        call: Returns what tells the call from others: arguments, queue and key.
        own_ids: Whether the caller has chosen the ids.

    Raises:
        LeaseLost, EntriesLost: The call cannot be recorded.
    """
    if (step := CURRENT_STEP.get()) is not None:
        return await enqueue(None if own_ids else _ids_in(run, step, digest_of(call())), planned=not own_ids)
    name, digest = f"{ENQUEUED}:{task}", digest_of(call())
    await check_call(run, name, own=True)
    key, recorded, former = await match_call(run, name, digest, run.history.saved)
    AttemptEnd.of(run).enqueued.setdefault(key, ())
    if former is not None:
        recorded = StepRecord.decode(former).result
    if recorded is not None:
        run.touch()
        return _handles_from(open_handle, await read_step_result(run, key, recorded))
    if run.stopping:
        await run.boundary()
    run.step_began(key)
    try:
        ids: Ids | None = None
        if not own_ids:
            ids = partial(_numbered, await _planned_id(run, key, digest))
        handles = await enqueue(ids, planned=not own_ids)
        data = _places(handles, own_ids=own_ids)
        if len(data) > run.payload_limit:
            data = await store_step_result(run, key, data, None, len(data))
        record = StepRecord(data, digest, task).encode()
        AttemptEnd.of(run).enqueued[key] = chunks_of(record)
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), wait=own_ids, progress=True)
        run.touch()
        run.step_recorded(stored=own_ids)
    finally:
        run.step_ended(key)
    return handles


async def repeated_id(run: Run, task: str, call: bytes) -> str:
    """Return the id of a task that a handler enqueues elsewhere, which a run that repeats the call gets again.

    Args:
        call: Text that tells the call from others: arguments, queue and key.

    Raises `LeaseLost`, `EntriesLost` if the id cannot be recorded.
    """
    digest = digest_of(call)
    if (step := CURRENT_STEP.get()) is not None:
        return _ids_in(run, step, digest)(0)
    name = f"{ENQUEUED}:{task}"
    await check_call(run, name, own=True)
    key, _, _ = await match_call(run, name, digest, run.history.saved)
    AttemptEnd.of(run).enqueued.setdefault(key, ())
    return await _planned_id(run, key, digest)


async def _planned_id(run: Run, key: str, digest: str) -> str:
    """Return the id that this attempt has stored for a call, after it is stored."""
    if (plan := run.history.saved.get(key)) is not None:
        return str(orjson.loads(plan)["id"])
    found = new_task_id()
    await run.recorder.put(Entry(Kind.SAVED, key, orjson.dumps({"h": digest, "id": found})), wait=True)
    return found


def _ids_in(run: Run, step: Step, digest: str) -> Ids:
    """Return the ids of tasks that a step enqueues: the same in each run of this try of the step."""
    counts = step.enqueued
    if counts is None:
        counts = step.enqueued = {}
    number = counts[digest] = counts.get(digest, 0) + 1
    history = run.history
    place = f"{step.idempotency_key} {history.replays} {history.counters.attempts} {step.attempt} {digest} {number}"
    data = bytearray(hashlib.blake2b(place.encode(), digest_size=16).digest())
    data[6], data[8] = data[6] & 0x0F | 0x80, data[8] & 0x3F | 0x80  # a custom UUID, version 8 of RFC 9562
    return partial(_numbered, str(UUID(bytes=bytes(data))))


def _numbered(base: str, number: int) -> str:
    return base if number == 0 else f"{base}-{number}"


def _places(handles: Sequence[TaskHandle[Any]], *, own_ids: bool) -> bytes:
    """Return the ids and places of the tasks of a call as JSON. Ids that are not the caller's follow from the first.

    They do not if a task of a unique key was there before.
    """
    numbered = all(handle.id == _numbered(handles[0].id, number) for number, handle in enumerate(handles))
    ids = [handle.id for handle in (handles if own_ids or not numbered else handles[:1])]
    at = [(handle.partition.namespace, handle.partition.queue) for handle in handles[:1]]
    return orjson.dumps({"ids": ids, "at": at, "partitions": [handle.partition.index for handle in handles]})


def _handles_from(open_handle: Opener[R], data: bytes) -> list[TaskHandle[R]]:
    """Return the handles of tasks from what `_places` returned."""
    stored = orjson.loads(data)
    ids = stored["ids"]
    handles = []
    for number, index in enumerate(stored["partitions"]):
        [namespace, queue] = stored["at"][0]
        task_id = ids[number] if len(ids) > 1 else _numbered(ids[0], number)
        handles.append(open_handle(task_id, Namespace(namespace).partition(queue, index)))
    return handles
