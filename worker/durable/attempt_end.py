"""The end of an attempt: what the act that stores its outcome changes in the checkpoint for the next attempt.

The records of enqueued tasks belong to their attempt: the next one enqueues new tasks. So do those of spawned children
that failed or are not joined yet. So do the records of steps that the handler has forgotten (`ctx.forget`): the next
attempt runs them again, under new idempotency keys. Nothing changes before the outcome is stored, so that a run which
takes over after a crash sees what the lost one saw.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import orjson

from ...queues.delivery.checkpoint import Entry, Kind, recorded_steps
from ...queues.event_log import walk_events
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.large_values import LargeValue
from ...queues.transport.pipelining import Argument
from ..errors import Reschedule, StepDefinitionError
from ..log import log_wait
from .emitting import forgotten_notes, read_bodies
from .journal.step_record import StepRecord
from .run import Run, RunObserver
from .steps.current import FORGOTTEN, check_call, check_name
from .steps.matching import digest_of, match_call

ENQUEUED: Final = "#enqueue"
"""Beginning of the names of the records of enqueued tasks."""

_FORGET: Final = "#forget"
"""Name of the records of `ctx.forget`."""

SPAWN: Final = "#spawn"
GATHER: Final = "#gather"
COMPLETED: Final = "#completed"
JOIN: Final = "#join"
RESULT: Final = "#result"
OPEN_CHILD: Final = "#open"
"""Beginnings of the names of the records of calls that spawn and await children."""

_ENDING: Final = re.compile(
    rf"(?:^|/)(?:(?:{ENQUEUED}|{SPAWN}|{GATHER}|{COMPLETED}|{JOIN}|{RESULT}|{OPEN_CHILD}):|{_FORGET}(?:#|$))"
)
"""Keys of records that end with each attempt."""

_OF_CHILDREN: Final = re.compile(rf"(?:^|/)(?:{SPAWN}|{GATHER}|{JOIN}|{RESULT}):")
"""Keys of records that end with the attempt unless the children have succeeded."""


class AttemptEnd(RunObserver):
    """Records that end with the attempt of a run: of enqueued tasks and calls of `forget`, and forgotten steps."""

    __slots__ = ("awaited", "enqueued", "forgotten", "records", "spawned", "undone")

    def __init__(self) -> None:
        self.awaited: dict[str, bool] = {}
        """Whether all children succeeded, by the keys of records of awaited children that this run has stored."""
        self.spawned: dict[str, bytes] = {}
        """Records of `ctx.spawn` that this run has stored."""
        self.enqueued: dict[str, Sequence[str]] = {}
        self.forgotten: dict[str, Sequence[str]] = {}
        """Both: names of the chunks of a large result, by the key of the record."""
        self.records: dict[str, bytes] = {}
        """Records of forgotten and undone steps of a task that has emitted, by their keys."""
        self.undone: list[tuple[BaseException, dict[str, Sequence[str]]]] = []
        """Steps of sagas and the failures that undid them: forgotten if the attempt ends with that failure."""

    @classmethod
    def of(cls, run: Run) -> AttemptEnd:
        """Return that of a run, which is created at its first use."""
        found = run.observer(cls)
        if found is None:
            found = cls()
            run.observe(found)
        return found


def checkpoint_changes(run: Run, error: BaseException) -> list[Argument]:
    """Return the fields of the checkpoint and their values for the next attempt; an empty value deletes the field.

    error: with which the attempt ends.
    """
    history, end = run.history, run.observer(AttemptEnd)
    ended = {key: chunks_of(record) for key, record in history.done.items() if _ENDING.search(key)}
    ended |= {key: () for key in history.saved if _ENDING.search(key)}
    if end is not None:
        causes = _causes(error)
        for failure, keys in end.undone:
            if any(failure is cause for cause in causes):
                end.forgotten |= keys
        ended |= {**end.enqueued, **end.forgotten}
    for key in _kept(run, end):
        ended.pop(key, None)
    changes: list[Argument] = []
    for key in sorted(ended):
        for field in (f"d:{key}", f"i:{key}", f"s:{key}", *(f"c:{chunk}" for chunk in ended[key])):
            changes += (field, "")
    if end is not None and end.forgotten:
        if run.emits:
            changes += _notes(run, {key: end.records[key] for key in end.forgotten if key in end.records})
        counts = orjson.loads(history.saved.get(FORGOTTEN, b"{}"))
        counts |= {key: counts.get(key, 0) + 1 for key in end.forgotten}
        field = f"s:{FORGOTTEN}"
        cipher = run.gateway.encryptor.of(run.delivery.partition, run.id)
        changes += (field, cipher.encrypt(field, orjson.dumps(counts)))
    return changes + run.heads_without(ended) if ended else changes


def _notes(run: Run, records: Mapping[str, bytes]) -> list[Argument]:
    """Return the notes of what the next attempt finds void, as changes of the checkpoint."""
    cipher = run.gateway.encryptor.of(run.delivery.partition, run.id)
    notes = forgotten_notes(run, records)
    return [part for name, note in notes.items() for part in (f"e:{name}", cipher.encrypt(f"e:{name}", note))]


def _kept(run: Run, end: AttemptEnd | None) -> Iterable[str]:
    """Return the keys of records of children that outlive the attempt: those of results, and of the joined children."""
    done = {key: record for key, record in run.history.done.items() if _OF_CHILDREN.search(key)}
    if done:
        done = {key: _readable(run, key, record) for key, record in done.items()}
    awaited = {key: _has_results(record) for key, record in done.items() if f"{SPAWN}:" not in key}
    spawned = [(key, record) for key, record in done.items() if f"{SPAWN}:" in key]
    if end is not None:
        awaited |= end.awaited
        spawned += end.spawned.items()
    kept = [key for key, results in awaited.items() if results]
    joined = {key.partition(f"{JOIN}:")[2] for key in kept if f"{JOIN}:" in key}
    return kept + [key for key, record in spawned if spawned_id(record) in joined]


def _readable(run: Run, key: str, record: bytes) -> bytes:
    """Return a record, which is still encrypted if no handler was called."""
    try:
        StepRecord.decode(record)
    except ValueError:
        return run.gateway.encryptor.of(run.delivery.partition, run.id).decrypt(f"d:{key}", record)
    return record


def _has_results(record: bytes) -> bool:
    """Return whether the record of awaited children has results; that of a failure is an object."""
    return StepRecord.decode(record).result[:1] != b"{"


def spawned_id(record: bytes) -> str:
    """Return the id of the child in the record of a call of `ctx.spawn`."""
    return str(orjson.loads(StepRecord.decode(record).result)["id"])


async def forget(run: Run, names: Sequence[str]) -> None:
    """Let the records of steps end with this attempt. See `Context.forget`.

    The keys are recorded: a resumed run must not forget what was recorded after the call.
    """
    await check_call(run, _FORGET, own=True)
    if not names:
        raise StepDefinitionError('forget needs the names of steps: await ctx.forget("charge")')
    for name in names:
        check_name("name", name)
    digest = digest_of(orjson.dumps(names))
    key, known_keys, _ = await match_call(run, _FORGET, digest)
    end = AttemptEnd.of(run)
    end.enqueued[key] = ()
    if known_keys is None:
        found = sorted(await _recorded_since(run, names))
        record = StepRecord(orjson.dumps(found), digest, ", ".join(names)).encode()
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), wait=False)
    else:
        found = orjson.loads(known_keys)
    end.forgotten |= await _with_chunks(run, found)


async def _recorded_since(run: Run, names: Sequence[str]) -> set[str]:
    """Return the keys of the named steps, and of all steps that were recorded after the first of them."""
    await run.flush()
    partition = run.delivery.partition
    wait = log_wait(f"task {run.id}", run.touch)
    recorded = await retry_while_unavailable(partial(recorded_steps, run.gateway, partition, run.id), on_wait=wait)
    scope = run.keys.scope
    known = {*recorded, *run.history.intents, *run.keys.under(scope, run.history)}
    named: set[str] = set()
    for name in names:
        found = {key for key in known if key.startswith(scope) and key[len(scope) :].partition("#")[0] == name}
        if not found:
            raise StepDefinitionError(f"forget: this task has called no step {scope + name!r}")
        named |= found
    last: dict[str, int] = {}
    number = 0
    async for event in walk_events(run.gateway, partition, run.id):
        number += 1
        if event.step is not None:
            last[event.step] = number
    first = min((last.get(key, 0) for key in named if key in recorded), default=number + 1)  # 0: it left the log
    later = {key for key in recorded if last.get(key, -1) >= first and not _ENDING.search(key)}
    return named | later


async def forget_undone(run: Run, keys: Iterable[str], error: BaseException) -> None:
    """Let the records of undone steps end with this attempt, if it ends with this error.

    If the handler continues after it, what it does then follows from the failure, which stays history.
    """
    AttemptEnd.of(run).undone.append((error, await _with_chunks(run, keys)))


async def _with_chunks(run: Run, keys: Iterable[str]) -> dict[str, Sequence[str]]:
    """Return the names of the chunks of recorded steps, by their keys. This run may have recorded some itself."""
    await run.flush()
    partition, names = run.delivery.partition, sorted(set(keys))
    if not names:
        return {}
    fields = [f"d:{name}" for name in names]
    wait = log_wait(f"task {run.id}", run.touch)
    read = partial(run.gateway.command, "HMGET", partition.steps(run.id), *fields)
    records = await retry_while_unavailable(read, on_wait=wait)
    cipher = run.gateway.encryptor.of(partition, run.id)
    known = {
        name: cipher.decrypt(field, record)
        for name, field, record in zip(names, fields, records, strict=True)
        if record is not None
    }
    if run.emits:
        await read_bodies(run)
        AttemptEnd.of(run).records |= known
    return {name: chunks_of(known[name]) if name in known else () for name in names}


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error, its causes and members; for a request to run later, also what was handled when it was raised."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is None or any(cause is known for known in found):
            continue
        found.append(cause)
        left.append(cause.__cause__)
        if isinstance(cause, Reschedule):
            left.append(cause.__context__)
        if isinstance(cause, BaseExceptionGroup):
            left += cause.exceptions
    return found


def chunks_of(record: bytes) -> Sequence[str]:
    """Return the names of the chunks of a large result; nothing for any other record."""
    try:
        value = LargeValue.decode(StepRecord.decode(record).result)
    except ValueError:  # it is still encrypted: no handler has seen it
        return ()
    return () if value is None else [f"{value.digest}:{number}" for number in range(value.chunks)]
