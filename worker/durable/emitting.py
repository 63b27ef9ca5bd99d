"""Items that a handler emits into the streams of its task, each visible once however often the handler runs.

A unit is what emits, and what runs again as a whole after a crash: a step, a method of an agent, or the body of a
function. The first item of a step's try stores a note in the checkpoint, in the same act: the try, and the streams
into which it emits. A try that is cut off or fails leaves the note, and the next try of the step first puts a mark into
these streams, which voids the items of the earlier ones. The record of the step takes over the note, so that its items
become void if a later attempt runs the step again (`ctx.forget`).

The body of a function runs again from its top, so its items are matched by their position in their scope and stream, as
its decisions are: those that are stored are skipped. The note of such a position is stored with each item, with a
checksum of all of them, which shows whether the handler emits something else than an earlier run.

A plain step within a step is part of the unit of that one. If it has retries, each of its tries is cut off by itself:
what such a part has emitted has a unit of its own, in the note of the outer step.

An item with a key is stored once, whichever try emits it, and no mark voids it.

An item and its note are entries of the checkpoint, so they are fenced and numbered like steps. They are written in the
background, and always before the outcome. They excuse no crash: what a resumed run continues from are its steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson
from pydantic_core import PydanticSerializationError

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import PayloadTooLarge
from ...queues.json_form import as_json
from ...queues.stream_items import (
    ITEM_BYTES,
    MIN_STREAM_ITEMS,
    STREAM_BYTES,
    STREAM_ITEMS,
    STREAMS,
    check_stream,
    item_place,
    key_digest,
    keyed_place,
    mark_place,
    notice_key,
)
from ...queues.transport.large_results import scan_fields
from ...queues.wording import shortened
from ..errors import StepDefinitionError
from ..resume_warning import warn_once
from .run import Run

_BODY: Final = "#emitted:"
"""Part of the name of the note of a body: `SCOPE#emitted:STREAM`."""

PENDING: Final = "#emitted"
"""Name of the note of bodies whose items are void, before the mark is written."""

_MAX_PARTS: Final = 100
"""Parts of a step with units of their own; what further ones emit belongs to the step."""

_USUAL: Final = 128, STREAM_BYTES // STREAM_ITEMS
"""Items, and bytes of each, that the average size starts from."""

_MAX_KEY: Final = 1000
"""Characters of the key of an item."""


@dataclass(slots=True)
class _Emitted:
    """The note of a unit: the last try that has emitted, its streams, and the notes of the steps within it."""

    attempt: int = 0
    streams: list[str] = field(default_factory=list)
    inner: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: object) -> _Emitted:
        """Read what `data` returned; nothing if another program has changed it."""
        match stored:
            case [int(attempt), list(streams), dict(inner)] if attempt >= 0:
                return cls(attempt, list(map(str, streams)), inner)
        return cls()

    @classmethod
    def decode(cls, note: bytes | None) -> _Emitted:
        try:
            return cls() if note is None else cls.of(orjson.loads(note))
        except ValueError:
            return cls()

    def without_items(self) -> _Emitted:
        """Return the note after the marks: the numbers of the tries stay."""
        inner = {name: _Emitted.of(stored).without_items().data for name, stored in self.inner.items()}
        return _Emitted(self.attempt, [], inner)

    @property
    def data(self) -> list[Any]:
        return [self.attempt, self.streams, self.inner]

    def marks(self, unit: str) -> list[Entry]:
        """Return the entries that void the items of the unit, and of the steps within it."""
        found = [Entry(Kind.CUT_OFF, mark_place(stream, unit, self.attempt), b"") for stream in self.streams]
        for name, stored in self.inner.items():
            found += _Emitted.of(stored).marks(name)
        return found


@dataclass(slots=True)
class _Try:
    """A try of a unit that has emitted in this run."""

    note: _Emitted
    positions: dict[str, int] = field(default_factory=dict)


class StepTry(Protocol):
    """The running try of a step."""

    key: str
    attempt: int


@dataclass(slots=True)
class Part:
    """A plain step with retries within a step. unit: known once it has emitted."""

    outer: StepTry
    name: str
    unit: str | None = None
    note: _Emitted = field(default_factory=_Emitted)
    positions: dict[str, int] = field(default_factory=dict)


CURRENT_PART: ContextVar[Part | None] = ContextVar("perdure_part", default=None)


@dataclass(slots=True)
class _Body:
    """The items of a scope's body in one stream: those that are stored, and those that this run has emitted.

    checksum: of all that this run has emitted. base: positions that void items had.
    """

    stored: int = 0
    stored_checksum: int = 0
    base: int = 0
    position: int = 0
    checksum: int = 0

    @classmethod
    def decode(cls, note: bytes | None) -> _Body:
        try:
            match orjson.loads(note or b"null"):
                case [int(stored), int(checksum), int(base)] if stored >= 0 and base >= 0:
                    return cls(stored, checksum, base)
        except ValueError:
            pass
        return cls()


class Emitter:
    """State of the streams into which this run has emitted."""

    __slots__ = ("bodies", "parts", "sizes", "tries")

    def __init__(self) -> None:
        self.tries: dict[str, _Try] = {}
        self.bodies: dict[str, _Body] = {}
        self.parts: dict[str, int] = {}
        """Number of parts that have emitted in this run, by their step and name."""
        self.sizes: dict[str, tuple[int, int]] = {}
        """Number of items, and their bytes, by stream."""

    def limit(self, stream: str, size: int) -> int:
        """Return how many items the stream keeps: about `STREAM_BYTES`, by the average size in this run."""
        count, total = self.sizes.get(stream, (_USUAL[0], _USUAL[0] * _USUAL[1]))
        self.sizes[stream] = count, total = count + 1, total + size
        return max(MIN_STREAM_ITEMS, min(STREAM_ITEMS, STREAM_BYTES * count // total))


async def emit_item(run: Run, item: Any, to: str, key: str | None, step: StepTry | None) -> None:
    """Emit an item into a stream of the task. See `Context.emit`. step: the running one; the call was checked."""
    known = run.history.streams
    if to not in known:
        _check_new(to, known)
    data = _encode(item, to)
    emitter = run.extras.of(Emitter, Emitter)
    run.touch()
    if key is not None:
        place = keyed_place(to, emitter.limit(to, len(data)), key_digest(_checked_key(key)))
        await _put(run, to, Entry(Kind.EMITTED, place, data))
    elif step is not None and (part := CURRENT_PART.get()) is not None and part.outer is step:
        await _emit_in_part(run, emitter, part, to, data)
    elif step is not None:
        await _emit_in_unit(run, emitter, step.key, step.attempt, to, data)
    elif (unit := run.keys.within) is not None:
        await _emit_in_unit(run, emitter, unit, 1, to, data)
    else:
        await _emit_in_body(run, emitter, to, data)


async def _put(run: Run, to: str, *entries: Entry) -> None:
    if to not in run.history.streams:
        run.history.streams.append(to)
        run.emits = True
    await run.recorder.put(*entries, wait=False)


def _try_of(run: Run, emitter: Emitter, unit: str, attempt: int) -> _Try:
    """Return the try of a unit that emits now."""
    found = emitter.tries.get(unit)
    if found is None:
        note = _Emitted.decode(run.history.emitted.get(unit))  # which `begin_unit` has read
        found = emitter.tries[unit] = _Try(_Emitted(max(note.attempt + 1, attempt), note.streams, note.inner))
    return found


async def _emit_in_part(run: Run, emitter: Emitter, part: Part, to: str, data: bytes) -> None:
    outer = _try_of(run, emitter, part.outer.key, part.outer.attempt).note
    if part.unit is None and len(outer.inner) >= _MAX_PARTS:
        await _emit_in_unit(run, emitter, part.outer.key, part.outer.attempt, to, data)
        return
    if part.unit is None:
        name = f"{part.outer.key}/{part.name}"
        number = emitter.parts[name] = emitter.parts.get(name, 0) + 1
        part.unit = f"{name}#part-{number}"
        part.note.attempt = _Emitted.of(outer.inner.get(part.unit)).attempt + 1
    position = part.positions[to] = part.positions.get(to, 0) + 1
    place = item_place(to, emitter.limit(to, len(data)), part.unit, part.note.attempt, position)
    item = Entry(Kind.EMITTED, place, data)
    if to in part.note.streams:
        await _put(run, to, item)
        return
    part.note.streams.append(to)
    outer.inner[part.unit] = part.note.data
    await _put(run, to, _noted(run, part.outer.key, outer.data), item)


async def begin_part(run: Run) -> None:
    """Void what earlier tries of the running part have emitted: another one begins. Raises `LeaseLost`."""
    part, emitter = CURRENT_PART.get(), run.extras.get(Emitter)
    if part is None or part.unit is None or emitter is None:
        return
    outer = _try_of(run, emitter, part.outer.key, part.outer.attempt).note
    marks = part.note.marks(part.unit)
    part.note, part.positions = _Emitted(part.note.attempt + 1), {}
    outer.inner[part.unit] = [part.note.attempt - 1, [], {}]
    await run.recorder.put(*marks, _noted(run, part.outer.key, outer.data), wait=False)


async def _emit_in_unit(run: Run, emitter: Emitter, unit: str, attempt: int, to: str, data: bytes) -> None:
    emitted = _try_of(run, emitter, unit, attempt)
    position = emitted.positions[to] = emitted.positions.get(to, 0) + 1
    place = item_place(to, emitter.limit(to, len(data)), unit, emitted.note.attempt, position)
    item = Entry(Kind.EMITTED, place, data)
    if position > 1:
        await _put(run, to, item)
        return
    if to not in emitted.note.streams:
        emitted.note.streams.append(to)
    await _put(run, to, _noted(run, unit, emitted.note.data), item)


async def _emit_in_body(run: Run, emitter: Emitter, to: str, data: bytes) -> None:
    name = f"{run.keys.scope}{_BODY}{to}"
    if name not in emitter.bodies:
        note = await run.history.read_emitted(name) if to in run.history.streams else None
        emitter.bodies.setdefault(name, _Body.decode(note))  # another branch may have read it
    body = emitter.bodies[name]
    body.position += 1
    body.checksum = zlib.crc32(data + b"\n", body.checksum)
    if body.position > body.stored:
        place = item_place(to, emitter.limit(to, len(data)), run.keys.scope, 0, body.base + body.position)
        note_data = [body.position, body.checksum, body.base]
        await _put(run, to, _noted(run, name, note_data), Entry(Kind.EMITTED, place, data))
    elif body.position == body.stored and body.checksum != body.stored_checksum:
        warn_once(
            f"task {run.envelope.task!r}: what its handler emits into stream {to!r} is not what an earlier run has "
            "emitted there, and that stays: emit what differs from run to run inside a step"
        )


def _noted(run: Run, name: str, data: list[Any]) -> Entry:
    note = run.history.emitted[name] = orjson.dumps(data)
    return Entry(Kind.EMITTING, name, note)


def _check_new(to: object, known: list[str]) -> None:
    """Check the name of a stream into which the task has not emitted. Raises `StepDefinitionError`."""
    try:
        check_stream(to)
    except ValueError as error:
        raise StepDefinitionError(str(error)) from None
    if len(known) >= STREAMS:
        raise StepDefinitionError(
            f"a task must emit into at most {STREAMS} streams, got {to!r} as the next one: "
            "put what distinguishes the items into the items"
        )


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY:
        raise StepDefinitionError(f"key must be a text of 1 to {_MAX_KEY} characters, got {shortened(repr(key), 80)}")
    return key


def _encode(item: Any, to: str) -> bytes:
    """Return an item as JSON. Raises `StepDefinitionError`, `PayloadTooLarge`."""
    try:
        data = as_json(item)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        shown = shortened(repr(item), 80)
        raise StepDefinitionError(f"an item of stream {to!r} must be JSON data, got {shown}: {error}") from None
    if len(data) > ITEM_BYTES:
        remedy = "emit several items, or save an artifact and emit its name"
        raise PayloadTooLarge(f"an item of stream {to!r}", len(data), ITEM_BYTES, remedy=remedy)
    return data


# units: called only if the task has emitted (`run.emits`)


async def begin_unit(run: Run, unit: str, *, within: bool = False) -> None:
    """Void what earlier tries of a unit have emitted: another one begins.

    Args:
        within: also what steps within it have emitted that are not recorded: the unit may not call them again.

    Raises `LeaseLost`, `EntriesLost`, `DecryptionError`.
    """
    history = run.history
    if history.pages is not None:
        await history.read_emitted(unit)
    units = [unit] if unit in history.emitted else []
    if within:
        units += [name for name in history.emitted if name.startswith(f"{unit}/") and name not in history.done]
    entries: list[Entry] = []
    emitter = run.extras.get(Emitter)
    for name in units:
        note = _Emitted.decode(history.emitted[name])
        if marks := note.marks(name):
            entries += (*marks, _noted(run, name, note.without_items().data))
        if emitter is not None:
            emitter.tries.pop(name, None)
    if entries:
        await run.recorder.put(*entries, wait=False)


def end_unit(run: Run, unit: str, record: bytes = b"", *, within: bool) -> tuple[bytes, list[Entry]]:
    """Return the record of a unit with its note, and the entries that delete the notes, to be put in one act.

    Args:
        record: of the step; its first line is an object.
        within: whether the unit may have steps within it, whose records are still known.
    """
    history, emitter = run.history, run.extras.get(Emitter)
    units = [unit] if unit in history.emitted else []
    note = _Emitted.decode(history.emitted.get(unit))
    if within:
        units += [name for name in history.emitted if name.startswith(f"{unit}/")]
        for name, stored in history.done.items():
            if name.startswith(f"{unit}/") and (inner := note_in(stored)) is not None:
                note.inner[name] = inner
    for name in units:
        del history.emitted[name]
        if emitter is not None:
            emitter.tries.pop(name, None)
    if record and (note.streams or note.inner):
        head, _, result = record.partition(b"\n")
        record = orjson.dumps(orjson.loads(head) | {"e": note.data}) + b"\n" + result
    return record, [Entry(Kind.EMITTING, name, b"") for name in units]


def note_in(record: bytes) -> list[Any] | None:
    """Return the note in the record of a step that has emitted, else None."""
    head = record.partition(b"\n")[0]
    if b'"e":' not in head:
        return None
    try:
        found = orjson.loads(head)
    except ValueError:
        return None
    return _Emitted.of(found["e"]).data if isinstance(found, Mapping) and "e" in found else None


# a resume


def notices_of_resume(run: Run, event: int, text: str) -> list[Entry]:
    """Return the entries that tell readers of the task's streams of a resume, to be put with its event."""
    data = orjson.dumps(text)
    key = notice_key(event)
    return [Entry(Kind.EMITTED, keyed_place(stream, STREAM_ITEMS, key), data) for stream in run.history.streams]


# the next attempt, which runs forgotten steps again


async def read_bodies(run: Run) -> None:
    """Read the notes of all bodies of a large checkpoint. Raises `DecryptionError`."""
    if run.history.pages is None:
        return
    partition, cipher = run.delivery.partition, run.gateway.encryptor.of(run.delivery.partition, run.id)
    async for name, value in scan_fields(run.gateway, partition.steps(run.id), f"e:*{_BODY}*"):
        run.history.emitted.setdefault(name.removeprefix("e:"), cipher.decrypt(name, value))


def forgotten_notes(run: Run, records: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the notes with which the next attempt begins if these steps are forgotten, by their names.

    It runs the steps again, and the handler from its top: what the steps and all bodies have emitted is void.

    records: by the keys of the steps.
    """
    found = {key: orjson.dumps(note) for key, record in records.items() if (note := note_in(record)) is not None}
    pending = set(_pending(run.history.emitted.get(PENDING)))
    for name, stored in run.history.emitted.items():
        scope, mark, stream = name.rpartition(_BODY)
        if mark:
            body = _Body.decode(stored)
            pending.add((scope, stream))
            found[name] = orjson.dumps([0, 0, body.base + body.stored])
    if pending:
        found[PENDING] = orjson.dumps(sorted(pending))
    return found


async def begin_bodies(run: Run) -> None:
    """Void what the bodies of an earlier attempt have emitted that has forgotten steps. Raises `DecryptionError`."""
    pending = _pending(await run.history.read_emitted(PENDING))
    if pending:
        del run.history.emitted[PENDING]
        marks = [Entry(Kind.CUT_OFF, mark_place(stream, scope, 0), b"") for scope, stream in pending]
        await run.recorder.put(*marks, Entry(Kind.EMITTING, PENDING, b""), wait=False)


def _pending(note: bytes | None) -> Iterable[tuple[str, str]]:
    try:
        found = orjson.loads(note or b"[]")
    except ValueError:
        return []
    pairs = found if isinstance(found, list) else []
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
