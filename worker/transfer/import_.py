"""Import of a task from a file that another deployment exported."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Annotated, Any, Final, Generic, Literal, TypeVar

import anyio.to_thread
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ...deadletter.burial import DEFAULT_RETENTION
from ...queues.derived_tasks import PLAIN, TaskPast, store_copy
from ...queues.ended_tasks import OUTCOME_FIELDS, SEALED_FIELDS, Outcome, store_ended
from ...queues.envelope import Envelope, TaskMessage, check_own_id, check_task_id, copied_envelope, new_task_id
from ...queues.errors import PerdureError
from ...queues.handle import TaskHandle
from ...queues.keys import DATA_FORMAT, SNAPSHOT, belongs_to, check_name, tenant_of, with_tenant
from ...queues.producer import Producer
from ...queues.records import State
from ...queues.sessions.record import parse_turn_id
from ...queues.transport.value_store import Sha256
from ...queues.wording import shortened
from ..agents.journal.snapshot import snapshot_number
from ..artifacts.links import ArtifactLink
from ..artifacts.store import ArtifactStore
from ..errors import TransferError, first_problem
from ..memory.hybrid import HybridStore
from ..memory.memory import Memory
from ..workspace.task_workspace import check_saved_link, check_workspace_field
from .export import read_lines, unpack

T = TypeVar("T")

_ENTRY: Final = re.compile(r"([0-9]{1,15})-([0-9]{1,15})")

_BATCH: Final = 64

_FIELD: Final = re.compile(r"[dis]:|c:#step:")

_ARTIFACT: Final = "s:#artifact:"

_MESSAGE: Final = re.compile(rb"[0-9]{1,15} .*", re.DOTALL)
_POSITION: Final = re.compile(rb"[0-9]{1,15} [!-~]{1,128}")
_NUMBER: Final = re.compile(rb"[0-9]{1,15}")

_NAMES: Final = re.compile(rb"[A-Za-z0-9._ -]{1,8400}")

_INBOX: Final = (
    (re.compile(r"m:[0-9]{1,15}"), _MESSAGE),
    (re.compile(r"n:[0-9]{1,15}"), _POSITION),
    (re.compile(r"v:[A-Za-z0-9][A-Za-z0-9._-]{0,63}"), _MESSAGE),
    (re.compile(r"values"), _NAMES),
    (re.compile(r"id:[!-~]{1,128}|[a-z]{1,32}"), _NUMBER),
)
"""Fields of an inbox, and what they hold. Those with one word count something."""

_LARGEST: Final = 2**53
"""Largest number that Lua counts exactly."""

_PROBLEM: Final = 300
"""Most characters of a problem, which quotes the file."""

_ENDED: Final = ("succeeded", "cancelled", "dead")
_LIVE: Final = ("queued", "limited", "scheduled", "dead")
"""States of a task that is stored as it ended, and of one that continues. A dead letter may be either."""

_Count = Annotated[int, Field(ge=0, le=_LARGEST)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Header(_Line):
    """First line: the task and its envelope."""

    id: Annotated[str, AfterValidator(check_task_id)]
    task: str
    queue: Annotated[str, AfterValidator(lambda name: check_name("queue", name))]
    state: Literal["queued", "limited", "scheduled", "dead", "succeeded", "cancelled"]
    ended: bool
    due: Annotated[int, Field(ge=0, le=_LARGEST)] | None
    events: _Count
    entries: _Count
    data_format: Annotated[int, Field(ge=1)] | None
    envelope: dict[str, Any]


class _NamedLine(_Line):
    """Field of the checkpoint or the inbox."""

    name: Annotated[str, Field(min_length=1, max_length=65_536)]


class _EventLine(_Line):
    """Entry of the log. plain: its data was not encrypted, as of an entry that a script wrote, and stays so."""

    id: str
    plain: bool = False
    fields: Annotated[dict[str, str], Field(max_length=32)]


class _OutcomeLine(_Line):
    """Fields of the record of a task that has ended."""

    fields: Annotated[dict[str, str], Field(max_length=32)]


class _ArtifactLine(_Line):
    """Bytes that follow in chunks."""

    hash: Sha256
    size: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported task.

    Attributes:
        source: Its id on the other deployment.
        was: Its state there.
        ended: Whether it is stored for reading, as it has ended there.
        memories: Number of memories in the file.
        new_memories: Number of those that the store did not have.
    """

    handle: TaskHandle[Any]
    source: str
    task: str
    was: str
    ended: bool
    events: int
    artifacts: int
    memories: int
    new_memories: int


@dataclass(slots=True)
class _Content:
    """Content of a checked file, as far as the import keeps it.

    Attributes:
        names: Kind and name of the fields of checkpoint and inbox.
        events, artifacts, memories: Numbers of them.
        snapshot: Number of the last event in the snapshot; None without one.
        last: Id of the last event.
        outcome, sealed: Those of a task that has ended.
    """

    header: _Header
    arguments: bytes = b""
    names: set[tuple[str, str]] = field(default_factory=set)
    events: int = 0
    snapshot: int | None = None
    last: str = "0-0"
    artifacts: int = 0
    memories: int = 0
    outcome: dict[str, bytes] | None = None
    sealed: dict[str, bytes] = field(default_factory=dict)


async def import_task(
    producer: Producer,
    store: ArtifactStore,
    file: IO[bytes],
    *,
    new_id: str | None = None,
    memories: Callable[[], AbstractAsyncContextManager[HybridStore]] | None = None,
    retention: float = DEFAULT_RETENTION,
) -> Imported:
    """Store the task of a file, which continues here unless it has ended; the whole file is checked before.

    Memory holds one line of the file at a time, and the arguments. What an import that was killed has uploaded expires.

    Args:
        file: Is read several times.
        new_id: Id of the task here, which has the tenant of the other one; the same id if omitted.
        memories: Opens the store for the memories of the file, before the task is stored. Known ones, by id or by text,
            stay as they are. Without it the memories are not stored.
        retention: Seconds for which a dead letter is kept. Another ended task is kept for the result TTL.

    Raises:
        TransferError: The file is damaged, truncated, or of a later version; or the id belongs to a task.
        ArtifactError, PayloadTooLarge, MemoryStoreError
    """
    content = await anyio.to_thread.run_sync(_read, file, store.limit)
    header = content.header
    queue, tenant = header.queue, tenant_of(header.id)
    if not belongs_to(producer.namespace.tenant, header.id) or tenant_of(new_id or header.id) not in (None, tenant):
        raise TransferError(f"task {header.id} must keep its tenant: import it as a task of {tenant or 'no tenant'}")
    task_id = with_tenant(tenant, new_id or header.id)
    if parse_turn_id(task_id) is not None:
        raise TransferError(f"task {task_id} is a turn of a session: give the imported task another id with --id")
    envelope = copied_envelope(header.envelope, task_id)
    TaskMessage(task_id, envelope, content.arguments, None, own_id=True).check(
        producer.payload_limit, producer.large_limit
    )
    if await producer.find(task_id) is not None:
        raise TransferError(
            f"task {task_id} exists already; nothing was stored: give the imported task another id with --id"
        )
    replayed = []
    if header.state == "dead" and not header.ended:
        replayed.append((_next(content.last), {"type": b"replayed", PLAIN: b'{"fresh":false}'}))
        content.events += 1
    await _save_artifacts(store, file)
    new_memories = await _restore_memories(memories, file) if memories is not None and content.memories else 0
    past = TaskPast(
        header.events,
        header.entries,
        header.data_format,
        _Part(file, "checkpoint", _named),
        _Part(file, "inbox", _named),
        _Part(file, "event", _event, replayed),
        content.snapshot,
    )
    place = (producer.gateway, producer.namespace, queue, task_id)
    stored: dict[str, Any] = {"envelope": envelope, "arguments": content.arguments, "past": past}
    if header.ended:
        outcome = Outcome(State(header.state), content.outcome or {}, content.sealed)
        kept = Envelope.decode(envelope).options.result_ttl or producer.result_ttl
        kept = retention if outcome.state is State.DEAD else kept
        partition = await store_ended(*place, **stored, outcome=outcome, retention=kept)
    else:
        partition = await store_copy(*place, **stored, source=f"import {new_task_id()}", due=header.due)
    return Imported(
        TaskHandle[Any](task_id, partition, producer.gateway, producer.notifications),
        header.id,
        header.task,
        header.state,
        header.ended,
        content.events,
        content.artifacts,
        content.memories,
        new_memories,
    )


class _Part(Generic[T]):
    """Lines of one kind, read from the file at each iteration, and what follows them."""

    def __init__(
        self, file: IO[bytes], kind: str, convert: Callable[[dict[str, Any]], T], added: Sequence[T] = ()
    ) -> None:
        self._file, self._kind, self._convert, self._added = file, kind, convert, added

    def __iter__(self) -> Iterator[T]:
        self._file.seek(0)
        for number, line in read_lines(self._file):
            if line.get("kind") == self._kind:
                with _problems_of(number):  # the file has changed
                    converted = self._convert(line)
                yield converted
        yield from self._added


def _named(line: dict[str, Any]) -> tuple[str, bytes]:
    return _NamedLine.model_validate(line).name, unpack(line)


def _event(line: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    event = _EventLine.model_validate(line)
    fields = {name: value.encode() for name, value in event.fields.items()}
    if "text" in line or "base64" in line:
        fields[PLAIN if event.plain and "n" not in fields else "data"] = unpack(line)
    return event.id, fields


async def _save_artifacts(store: ArtifactStore, file: IO[bytes]) -> None:
    file.seek(0)
    lines = read_lines(file)
    for number, line in lines:
        if line.get("kind") == "artifact":
            with _problems_of(number):
                artifact = _ArtifactLine.model_validate(line)
            stored = await store.save(f"artifact {artifact.hash}", _chunks(lines, artifact.size))
            if stored.hash != artifact.hash:
                raise TransferError(f"line {number}: the file changed while it was read")


async def _chunks(lines: Iterator[tuple[int, dict[str, Any]]], size: int) -> AsyncIterator[bytes]:
    while size > 0:
        number, line = next(lines, (0, {}))
        if line.get("kind") != "chunk":
            raise TransferError(f"line {number}: the file changed while it was read")
        with _problems_of(number):
            data = unpack(line)
        size -= len(data)
        yield data


async def _restore_memories(opened: Callable[[], AbstractAsyncContextManager[HybridStore]], file: IO[bytes]) -> int:
    """Store the memories unchanged, except known ones. Return the number of new ones."""
    file.seek(0)
    found = (_memory(line) for _, line in read_lines(file) if line.get("kind") == "memory")
    new = 0
    async with opened() as store:
        while some := list(islice(found, _BATCH)):
            new += await store.restore(some)
    return new


def _memory(line: dict[str, Any]) -> Memory:
    try:
        return Memory.model_validate_json(unpack(line))
    except ValidationError as error:
        raise ValueError(f"the memory is not valid: {first_problem(error)}") from None


def _next(entry: str) -> str:
    at, _, number = entry.partition("-")
    return f"{at}-{int(number) + 1}"


def _read(file: IO[bytes], limit: int) -> _Content:
    """Return what a file holds, without the bytes of its artifacts. Raises `TransferError`, with line and field."""
    reader = _ArtifactCheck(limit)
    content: _Content | None = None
    number = 0
    for number, line in read_lines(file):
        with _problems_of(number):
            if line.get("kind") != "chunk":
                reader.end()
            if (line.get("kind") == "header") != (number == 1):
                raise ValueError(f"a line of kind {line.get('kind')!r} cannot be here")
            if content is None:
                content = _Content(_header(line))
            else:
                _take(content, reader, line)
    with _problems_of(number):
        reader.end()
    if content is None or not content.arguments:
        raise TransferError("the file has no arguments: export it again")
    if content.header.ended and content.outcome is None:
        raise TransferError("the file has no outcome: export it again")
    return content


@contextmanager
def _problems_of(number: int) -> Iterator[None]:
    """Raise `TransferError` with the number of the line for whatever its values cause."""
    try:
        yield
    except TransferError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, PerdureError) as error:
        if isinstance(error, ValidationError):
            problem = first_problem(error)
        else:
            problem = f"{error.args[0]}: it is missing" if isinstance(error, KeyError) else str(error)
        raise TransferError(f"line {number}: {shortened(problem, _PROBLEM)}") from None


def _take(content: _Content, reader: _ArtifactCheck, line: dict[str, Any]) -> None:
    match kind := line.get("kind"):
        case "arguments":
            _take_arguments(content, line)
        case "outcome" | "sealed":
            _take_outcome(content, line)
        case "checkpoint" | "inbox":
            name, data = _named(line)
            if kind == "checkpoint":
                _check_field(content.header.id, name, data)
                if name == f"s:{SNAPSHOT}":
                    content.snapshot = snapshot_number(content.header.id, data)
            elif not any(names.fullmatch(name) and values.fullmatch(data) for names, values in _INBOX):
                raise ValueError(f"field {name[:80]!r} of the inbox is unknown, or its value is not valid")
            if (kind, name) in content.names:
                raise ValueError(f"field {name[:80]!r} of the {kind} is there twice")
            content.names.add((kind, name))
        case "event":
            content.last = _check_event(line, content.last, content.header.events)
            content.events += 1
        case "artifact":
            artifact = _ArtifactLine.model_validate(line)
            reader.begin(artifact.hash, artifact.size)
            content.artifacts += 1
        case "chunk":
            reader.take(unpack(line))
        case "memory":
            _memory(line)
            content.memories += 1
        case _:
            raise ValueError(f"kind {kind!r} is unknown: it is of a later version, or damaged")


def _take_arguments(content: _Content, line: dict[str, Any]) -> None:
    if content.arguments:
        raise ValueError("arguments: they are there twice")
    content.arguments = unpack(line)
    if not isinstance(orjson.loads(content.arguments), dict):
        raise ValueError("text: arguments must be a JSON object")


def _take_outcome(content: _Content, line: dict[str, Any]) -> None:
    if not content.header.ended:
        raise ValueError("a task that has not ended has no outcome")
    if line.get("kind") == "outcome":
        if content.outcome is not None:
            raise ValueError("outcome: it is there twice")
        content.outcome = {name: value.encode() for name, value in _OutcomeLine.model_validate(line).fields.items()}
        for name, value in content.outcome.items():
            if name not in OUTCOME_FIELDS or not OUTCOME_FIELDS[name].fullmatch(value):
                raise ValueError(f"field {name[:80]!r} of the outcome is unknown, or its value is not valid")
        return
    name, data = _named(line)
    if name not in SEALED_FIELDS or name in content.sealed:
        raise ValueError(f"sealed field {name[:80]!r} is unknown, or is there twice")
    orjson.loads(data)
    content.sealed[name] = data


def _header(line: dict[str, Any]) -> _Header:
    header = _Header.model_validate(line)
    if header.state not in (_ENDED if header.ended else _LIVE):
        raise ValueError(f"ended: a task that is {header.state} must not have the value {str(header.ended).lower()}")
    if not header.ended:
        check_own_id(header.id, tenant_of(header.id))
    try:
        envelope = Envelope.decode(orjson.dumps(header.envelope))
    except ValueError as error:
        raise ValueError(f"envelope: {error}") from None
    if envelope.id != header.id or envelope.task != header.task:
        raise ValueError("envelope: it belongs to another task")
    if max(header.data_format or 1, envelope.requires) > DATA_FORMAT:
        raise ValueError(f"data_format: the task needs workers that know {header.data_format}: update Perdure")
    return header


def _check_field(task_id: str, name: str, data: bytes) -> None:
    """Check a field of the checkpoint, as far as it leads to files."""
    if not _FIELD.match(name):
        raise ValueError(f"checkpoint field {name[:80]!r} is unknown: it is of a later version, or damaged")
    if name.startswith(_ARTIFACT):
        ArtifactLink.decode(task_id, name.removeprefix(_ARTIFACT), data)
    check_workspace_field(task_id, name.removeprefix("s:"), data)


def _check_event(line: dict[str, Any], last: str, events: int) -> str:
    entry, fields = _event(line)
    found = _ENTRY.fullmatch(entry)
    if found is None or tuple(map(int, found.groups())) <= tuple(map(int, last.split("-"))):
        raise ValueError(f"id: it must be that of an entry after {last}, got {entry[:80]!r}")
    if not fields.get("type"):
        raise ValueError("fields.type: an event must have one")
    if "n" in fields and not (_NUMBER.fullmatch(fields["n"]) and 0 < int(fields["n"]) <= events):
        raise ValueError(f"fields.n: it must be a number from 1 to {events}, got {fields['n'][:80]!r}")
    if "data" in fields:
        check_saved_link(line["fields"]["type"], fields["data"])
    return entry


class _ArtifactCheck:
    """Check of the bytes of artifacts against their hashes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expected: tuple[str, int] | None = None
        self._hash = hashlib.sha256()
        self._size = 0

    def begin(self, digest: str, size: int) -> None:
        if size > self._limit:
            raise ValueError(f"size: an artifact has {size:,} bytes; PERDURE_ARTIFACT_LIMIT allows {self._limit:,}")
        self._expected, self._hash, self._size = (digest, size), hashlib.sha256(), 0

    def take(self, data: bytes) -> None:
        if self._expected is None or not data:
            raise ValueError("bytes without an artifact")
        self._hash.update(data)
        self._size += len(data)

    def end(self) -> None:
        if self._expected is not None and (self._hash.hexdigest(), self._size) != self._expected:
            raise ValueError(f"the bytes of artifact {self._expected[0]} are not those that were exported")
        self._expected = None
