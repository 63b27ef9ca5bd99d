"""Import of a task from a file that another deployment exported."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any, Final, Generic, TypeVar

import anyio.to_thread
import orjson
from pydantic import ValidationError

from ...queues import Envelope, Producer, TaskHandle, check_task_id, new_task_id
from ...queues.derived_tasks import TaskPast, store_copy
from ...queues.envelope import copied_envelope
from ...queues.keys import DATA_FORMAT
from ..artifacts import ArtifactStore
from ..errors import TransferError
from ..errors.validation import first_problem
from ..memory import HybridStore, Memory
from .lines import read_lines, unpack

__all__ = ["Imported", "import_task"]

T = TypeVar("T")

_ENTRY: Final = re.compile(r"([0-9]{1,15})-([0-9]{1,15})")

_BATCH: Final = 64

_FIELD: Final = re.compile(r"[dis]:|c:#step:")


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported task.

    Attributes:
        source: Its id on the other deployment.
        was: Its state there.
        memories: Number of memories in the file.
        new_memories: Number of those that the store did not have.
    """

    handle: TaskHandle[Any]
    source: str
    task: str
    was: str
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
        last: Id of the last event.
    """

    header: dict[str, Any] = field(default_factory=dict)
    arguments: bytes = b""
    names: set[tuple[str, str]] = field(default_factory=set)
    events: int = 0
    last: str = "0-0"
    artifacts: int = 0
    memories: int = 0


async def import_task(
    producer: Producer,
    store: ArtifactStore,
    file: IO[bytes],
    *,
    new_id: str | None = None,
    memories: Callable[[], AbstractAsyncContextManager[HybridStore]] | None = None,
) -> Imported:
    """Store the task of a file, which continues here. Nothing is stored before the whole file was checked.

    Memory holds one line of the file at a time, and the arguments. What an import that was killed has uploaded expires.

    Args:
        file: Is read several times.
        new_id: Id of the task here; the same as on the other deployment if omitted.
        memories: Opens the store for the memories of the file, before the task is stored. Known ones, by id or by text,
            stay as they are. Without it the memories are not stored.

    Raises:
        TransferError: The file is damaged, truncated, or of a later version; or the id belongs to a task.
        ArtifactError, PayloadTooLarge, MemoryStoreError
    """
    content = await anyio.to_thread.run_sync(_read, file, store.limit)
    header = content.header
    task_id, queue = new_id or header["id"], header["queue"]
    if await producer.find(task_id) is not None:
        raise TransferError(
            f"task {task_id} exists already; nothing was stored: give the imported task another id with --id"
        )
    replayed = []
    if header["state"] == "dead":
        replayed.append((_next(content.last), {"type": b"replayed", "data": b'{"fresh":false}'}))
        content.events += 1
    await _save_artifacts(store, file)
    new_memories = await _restore_memories(memories, file) if memories is not None and content.memories else 0
    past = TaskPast(
        header["events"],
        header["entries"],
        header["data_format"],
        _Part(file, "checkpoint", _named),
        _Part(file, "inbox", _named),
        _Part(file, "event", _event, replayed),
    )
    partition = await store_copy(
        producer.gateway,
        producer.namespace,
        queue,
        task_id,
        envelope=copied_envelope(header["envelope"], task_id),
        arguments=content.arguments,
        past=past,
        source=f"import {new_task_id()}",
    )
    handle = TaskHandle[Any](task_id, partition, producer.gateway, producer.notifications)
    return Imported(
        handle,
        header["id"],
        header["task"],
        header["state"],
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
        for _, line in read_lines(self._file):
            if line["kind"] == self._kind:
                yield self._convert(line)
        yield from self._added


def _named(line: dict[str, Any]) -> tuple[str, bytes]:
    return line["name"], unpack(line)


def _event(line: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    fields = {str(name): str(value).encode() for name, value in line["fields"].items()}
    if "n" in fields:
        int(fields["n"])
    if "text" in line or "base64" in line:
        fields["data"] = unpack(line)
    return line["id"], fields


async def _save_artifacts(store: ArtifactStore, file: IO[bytes]) -> None:
    file.seek(0)
    lines = read_lines(file)
    for _, line in lines:
        if line["kind"] == "artifact":
            await store.save(f"artifact {line['hash']}", _chunks(lines, line["size"]))


async def _chunks(lines: Iterator[tuple[int, dict[str, Any]]], size: int) -> AsyncIterator[bytes]:
    while size > 0:
        data = unpack(next(lines)[1])
        size -= len(data)
        yield data


async def _restore_memories(opened: Callable[[], AbstractAsyncContextManager[HybridStore]], file: IO[bytes]) -> int:
    """Store the memories unchanged, except known ones. Return the number of new ones."""
    file.seek(0)
    found = (_memory(line) for _, line in read_lines(file) if line["kind"] == "memory")
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
    """Return what a file holds, without the bytes of its artifacts. Raises `TransferError`, with the line."""
    content, reader = _Content(), _ArtifactCheck(limit)
    number = 0
    for number, line in read_lines(file):
        try:
            if line["kind"] != "chunk":
                reader.end()
            _take(content, reader, line, number)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise TransferError(f"line {number}: {problem}") from None
    try:
        reader.end()
    except ValueError as error:
        raise TransferError(f"line {number}: {error}") from None
    if not content.arguments:
        raise TransferError("the file has no arguments: export it again")
    return content


def _take(content: _Content, reader: _ArtifactCheck, line: dict[str, Any], number: int) -> None:
    kind = line["kind"]
    if (kind == "header") != (number == 1):
        raise ValueError(f"a line of kind {kind!r} cannot be here")
    match kind:
        case "header":
            content.header = _header(line)
        case "arguments":
            content.arguments = unpack(line)
        case "checkpoint" | "inbox":
            name, _ = _named(line)
            if kind == "checkpoint" and not _FIELD.match(name):
                raise ValueError(f"checkpoint field {name!r} is unknown: it is of a later version, or damaged")
            if (kind, name) in content.names:
                raise ValueError(f"field {name!r} of the {kind} is there twice")
            content.names.add((kind, name))
        case "event":
            content.last = _check_event(line, content.last)
            content.events += 1
        case "artifact":
            reader.begin(line["hash"], line["size"])
            content.artifacts += 1
        case "chunk":
            reader.take(unpack(line))
        case "memory":
            _memory(line)
            content.memories += 1
        case _:
            raise ValueError(f"kind {kind!r} is unknown: it is of a later version, or damaged")


def _header(line: dict[str, Any]) -> dict[str, Any]:
    check_task_id(line["id"])
    envelope = Envelope.decode(orjson.dumps(line["envelope"]))
    if envelope.id != line["id"] or envelope.task != line["task"]:
        raise ValueError("the envelope belongs to another task")
    for name in ("events", "entries"):
        if not isinstance(line[name], int) or line[name] < 0:
            raise ValueError(f"{name} must be a number, got {line[name]!r}")
    if line["state"] not in ("scheduled", "dead") or not isinstance(line["queue"], str):
        raise ValueError("the state or the queue is not valid")
    if max(line["data_format"] or 1, envelope.requires) > DATA_FORMAT:
        raise ValueError(f"the task needs workers that know data format {line['data_format']}: update Perdure")
    return line


def _check_event(line: dict[str, Any], last: str) -> str:
    found = _ENTRY.fullmatch(line["id"])
    if found is None or tuple(map(int, found.groups())) <= tuple(map(int, last.split("-"))):
        raise ValueError(f"id of the event must be after {last}, got {line['id']!r}")
    return _event(line)[0]


class _ArtifactCheck:
    """Check of the bytes of artifacts against their hashes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expected: tuple[str, int] | None = None
        self._hash = hashlib.sha256()
        self._size = 0

    def begin(self, digest: str, size: int) -> None:
        if size > self._limit:
            raise ValueError(f"an artifact has {size:,} bytes; PERDURE_ARTIFACT_LIMIT allows {self._limit:,}")
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
