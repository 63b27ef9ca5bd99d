"""Export of a task that does not run.

Lines of an exported task.

Each line is a JSON object with a `kind`. In order: the `header`, the `arguments`, for a task that has ended the
`outcome` and its `sealed` fields, fields of the `checkpoint` and of the `inbox`, each `event` of the log, each
`artifact` followed by its `chunk` lines, each `memory`, and the `end` with the number of the lines before it and their
SHA-256. Bytes are a `text` where they are UTF-8, else `base64`.

A task continues where it is imported, unless the file has its outcome: then it is stored there for reading. The file of
a dead letter has one only if it stays a dead letter at its source.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, Any, Final, cast

import orjson

from ...queues.delivery.checkpoint import close_exported, read_mark
from ...queues.derived_tasks import confirm_successor, read_task_input
from ...queues.ended_tasks import read_outcome
from ...queues.errors import UnreadableRecord
from ...queues.handle import TaskHandle
from ...queues.joins import has_joins
from ...queues.junk import count_of
from ...queues.keys import Partition
from ...queues.producer import Producer
from ...queues.records import State, number_of
from ...queues.security.encryption import ERROR, event_field, is_encrypted, message_field
from ...queues.security.hash_chain import LogCheck, open_head
from ...queues.sessions.record import parse_turn_id
from ...queues.transport.gateway import Gateway
from ...queues.transport.large_results import scan_fields, scan_results
from ...queues.transport.scripts import pairs
from ...queues.values import value_kind
from ...queues.waits import is_wait_field
from ..artifacts.links import task_links
from ..artifacts.store import ArtifactStore
from ..durable.journal.run_events import Exported
from ..errors import TransferError
from ..memory.hybrid import HybridStore
from ..memory.task_memory import CITED_MEMORIES, cited_memories
from ..workspace.task_workspace import task_workspace_files

OpensMemories = Callable[[], AbstractAsyncContextManager[HybridStore | None]]

_PAGE: Final = 200

_FIELDS: Final = ("[is]:*", "c:#*")
"""Checkpoint fields that are encrypted each under its own name. Other chunks are part of step records."""


@dataclass(frozen=True, slots=True)
class ExportedTask:
    """A written export.

    Attributes:
        digest: SHA-256 of its lines.
        mark: What `close_source` compares.
        ended: Whether the file has its outcome, and nothing is left to cancel.
        cited: Number of the memories that the task has stored, found or had in a prompt.
        memories: Number of those that the file has.
    """

    handle: TaskHandle[object]
    digest: str
    mark: tuple[bytes, ...]
    ended: bool
    events: int
    artifacts: int
    cited: int
    memories: int


async def export_task(
    producer: Producer,
    handle: TaskHandle[object],
    store: ArtifactStore,
    file: IO[bytes],
    memories: OpensMemories | None = None,
    *,
    archived: bool = False,
) -> ExportedTask:
    """Write a task to a file, decrypted.

    Args:
        memories: Opens the store of the memories that the task cites, or nothing; without it the file has none.
        archived: The task has ended, and stays here: also a dead letter is written with its outcome.

    Raises:
        TransferError: The task runs, waits for children, is a turn of a session that has not ended, or changed
            meanwhile; or another task waits for its end.
        UnreadableRecord, DecryptionError, ArtifactError, MemoryStoreError
    """
    gateway, partition, task_id = producer.gateway, handle.partition, handle.id
    mark = await read_mark(gateway, partition, task_id)
    state = mark[0].decode("utf-8", "replace")
    ended = state in _ENDED or (archived and state == State.DEAD)
    if not ended:
        await _check(gateway, handle, mark)
    origin = await read_task_input(gateway, partition, task_id)
    record = partition.record(task_id)
    data_format, due, finished = await gateway.command("HMGET", record, "format", "due", "finished")
    now, _ = await gateway.command("TIME", node_of=record)
    out = LineWriter(file)
    out.write(
        "header",
        format=FORMAT,
        version=VERSION,
        perdure=version("perdure"),
        at=int(now) * 1000,
        id=task_id,
        task=origin.envelope.task,
        queue=partition.queue,
        state=state,
        ended=ended,
        finished=number_of(record, "finished", finished) if ended else None,
        due=None if due is None or mark[6] else number_of(record, "due", due),
        events=number_of(record, "events", mark[1]),
        entries=number_of(record, "entries", mark[2]),
        data_format=None if data_format is None else number_of(record, "format", data_format),
        envelope=orjson.loads(origin.stored),
    )
    out.write("arguments", origin.arguments)
    if ended:
        outcome = await read_outcome(gateway, partition, task_id, State(state))
        out.write("outcome", fields={name: value.decode() for name, value in outcome.fields.items()})
        for name, data in outcome.sealed.items():
            out.write("sealed", data, name=name)
    async for key, value in scan_results(gateway, partition, task_id):
        out.write("checkpoint", value, name=f"d:{key}")
    cited = await _write_fields(gateway, partition, task_id, out)
    await _write_inbox(gateway, partition, task_id, out)
    events = await _write_log(gateway, partition, task_id, out)
    artifacts = await _write_artifacts(gateway, partition, task_id, store, out)
    written = await _write_memories(memories, cited, out) if memories is not None and cited else 0
    if await read_mark(gateway, partition, task_id) != mark:
        raise TransferError(f"task {task_id} changed while it was exported: export it again")
    return ExportedTask(handle, out.end(), mark, ended, events, artifacts, len(cited), written)


_ENDED: Final = (State.SUCCEEDED, State.CANCELLED)

_LIVE: Final = (b"queued", b"limited", b"scheduled", b"dead")
"""Stored states of a task that continues at another deployment."""


async def _check(gateway: Gateway, handle: TaskHandle[object], mark: tuple[bytes, ...]) -> None:
    """Refuse a task that cannot continue at another deployment. Raises `TransferError`."""
    task_id, dead = handle.id, mark[0] == b"dead"
    if mark[0] not in _LIVE:
        raise TransferError(f"task {task_id} cannot be exported: its state is missing or unknown")
    if mark[0] == b"queued" and await handle.status() is State.RUNNING:
        raise TransferError(
            f"task {task_id} cannot be exported while it runs: wait until it waits, or end it with "
            f"'perdure task cancel {task_id}'"
        )
    if parse_turn_id(task_id) is not None:
        raise TransferError(f"task {task_id} is a turn of a session: see 'perdure session export'")
    watched, parent = await gateway.command(
        "HMGET", handle.partition.record(task_id), "kept" if dead else "watchers", "joins"
    )
    if watched is not None:
        raise TransferError(f"task {task_id} cannot be exported: another task waits for its end, which stays here")
    if parent is not None and not dead and await has_joins(gateway, handle.partition, task_id):
        raise TransferError(
            f"task {task_id} cannot be exported while it waits for children: wait until they have ended"
        )


async def close_source(producer: Producer, exported: ExportedTask) -> bool:
    """Cancel an exported task. Return whether that was done: not if it has changed since it was read."""
    handle = exported.handle
    source = await producer.gateway.command("HGET", handle.partition.record(handle.id), "handed_from")
    if source is not None:
        await confirm_successor(producer.gateway, producer.namespace, source.decode())
    event = Exported(digest=exported.digest).to_json()
    return await close_exported(
        producer.gateway, handle.partition, handle.id, exported.mark, event=event, retention=producer.result_ttl
    )


async def _write_fields(gateway: Gateway, partition: Partition, task_id: str, out: LineWriter) -> list[str]:
    """Write the other fields of the checkpoint; return the ids of the memories that the task cites."""
    cipher, citing = gateway.encryptor.of(partition, task_id), {}
    for pattern in _FIELDS:
        async for name, value in scan_fields(gateway, partition.steps(task_id), pattern):
            data = cipher.decrypt(name, value)
            out.write("checkpoint", data, name=name)
            if name.startswith(f"s:{CITED_MEMORIES}"):
                citing[name.removeprefix("s:")] = data
    return cited_memories(citing)


async def _write_inbox(gateway: Gateway, partition: Partition, task_id: str, out: LineWriter) -> None:
    cipher = gateway.encryptor.of(partition, task_id)
    async for name, value in scan_fields(gateway, partition.inbox(task_id), "*"):
        if is_wait_field(name) or name == "updates" or name.startswith("o:"):
            continue  # the run opens its waits again; answers that it has not used stay here
        data = value
        if name.startswith("v:"):
            number, space, stored = value.partition(b" ")
            data = number + space + cipher.decrypt(value_kind(name.removeprefix("v:")), stored)
        if name.startswith("m:"):
            at, space, message = value.partition(b" ")
            data = at + space + cipher.decrypt(message_field(count_of(name[2:].encode())), message)
        out.write("inbox", data, name=name)


async def _write_log(gateway: Gateway, partition: Partition, task_id: str, out: LineWriter) -> int:
    cipher, after, count = gateway.encryptor.of(partition, task_id), "0-0", 0
    stored = await gateway.command("HGET", partition.record(task_id), "head")
    check = None if stored is None else LogCheck(task_id, open_head(cipher, stored)[2])
    while True:
        page = await gateway.command("XRANGE", partition.log(task_id), f"({after}", "+", "COUNT", _PAGE)
        for entry, values in page:
            fields = pairs(values)
            data, plain = fields.pop(b"data", None), {}
            try:
                named = {name.decode(): value.decode() for name, value in fields.items()}
            except UnicodeDecodeError as error:
                problem = f"entry {entry.decode()} is not UTF-8 ({error})"
                raise UnreadableRecord(partition.log(task_id), problem, "delete the entry") from None
            if (number := fields.get(b"n")) is not None:
                at = number_of(partition.log(task_id), "n", number)
                if data is not None or not cipher.accepts_plain:
                    data = cipher.decrypt(event_field(at, named.get("type", "")), data or b"")
                if check is not None:
                    check.add(at, named.get("type", ""), data or b"")
            elif data is not None and is_encrypted(data):
                data = cipher.decrypt(ERROR, data)
            elif data is not None:
                plain = {"plain": True}
            out.write("event", data, id=entry.decode(), fields=named, **plain)
        count += len(page)
        if len(page) < _PAGE:
            if check is not None:
                check.finish()
            return count
        after = page[-1][0].decode()


async def _write_artifacts(
    gateway: Gateway, partition: Partition, task_id: str, store: ArtifactStore, out: LineWriter
) -> int:
    linked = await task_links(gateway, partition, task_id)
    sizes = {link.hash: (f"artifact {link.name!r} of task {task_id}", link.size) for link in linked}
    async for what, file in task_workspace_files(gateway, partition, task_id, store):
        sizes.setdefault(file.hash, (what, file.size))
    for digest, (what, size) in sizes.items():
        out.write("artifact", hash=digest, size=size)
        async for chunk in store.chunks(what, digest, size):
            out.write("chunk", chunk)
    return len(sizes)


async def _write_memories(opens: OpensMemories, ids: Sequence[str], out: LineWriter) -> int:
    """Write the memories that exist. Return their number."""
    count = 0
    async with opens() as store:
        for at in range(0, 0 if store is None else len(ids), _PAGE):
            for memory in await cast("HybridStore", store).get(ids[at : at + _PAGE]):
                out.write("memory", memory.model_dump_json().encode())
                count += 1
    return count


FORMAT: Final = "perdure-task"

VERSION: Final = 1

_MAX_LENGTH: Final = 1 << 28
"""Largest size of a line in bytes."""


class LineWriter:
    """Writer of lines that counts and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._lines = 0

    def write(self, kind: str, data: bytes | None = None, /, **fields: Any) -> None:
        """Write a line, with bytes if there are any."""
        line = orjson.dumps({"kind": kind, **fields, **({} if data is None else _pack(data))}) + b"\n"
        self._hash.update(line)
        self._lines += 1
        self._file.write(line)

    def end(self) -> str:
        """Write the last line; return the digest."""
        digest = self._hash.hexdigest()
        self._file.write(orjson.dumps({"kind": "end", "lines": self._lines, "sha256": digest}) + b"\n")
        return digest


def _pack(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def unpack(line: dict[str, Any]) -> bytes:
    """Return the bytes of a line. Raises `ValueError`, `TypeError`, `KeyError`."""
    if "text" in line:
        if not isinstance(line["text"], str):
            raise TypeError("text: it must be a text")
        return line["text"].encode()
    try:
        return base64.b64decode(line["base64"], validate=True)
    except (ValueError, TypeError):
        raise ValueError("base64: it is not valid") from None


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines but the last with their numbers, and check the last. Raises `TransferError`.

    A damaged file may yield lines before it raises.
    """
    found, number = hashlib.sha256(), 0
    while text := file.readline(_MAX_LENGTH):
        number += 1
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            line = None
        if number == 1:
            _check_header(line)
        if not isinstance(line, dict) or not text.endswith(b"\n"):
            raise TransferError(f"line {number} is damaged, or the file is truncated there: export it again")
        if line.get("kind") == "end":
            if line.get("lines") != number - 1 or line.get("sha256") != found.hexdigest():
                raise TransferError(f"line {number}: the lines before it were changed or are missing: export it again")
            if file.read(1):
                raise TransferError(f"line {number + 1}: nothing may follow the last line of a file")
            return
        found.update(text)
        yield number, line
    raise TransferError(
        f"the file is truncated after line {number}: export it again" if number else "the file is empty"
    )


def _check_header(line: Any) -> None:
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise TransferError("line 1: the file is not one that 'perdure task export' wrote")
    version = line.get("version")
    if type(version) is not int:
        raise TransferError("line 1: version: it must be a number")
    if version != VERSION:
        raise TransferError(
            f"line 1: the file has version {version}; this version of Perdure reads version {VERSION}: update it"
        )
