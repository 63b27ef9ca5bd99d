"""Export of a task that does not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, Final, cast

import orjson

from ...queues.delivery.checkpoint_edit import close_exported, read_mark
from ...queues.derived_tasks import confirm_successor, read_task_input
from ...queues.handle import TaskHandle
from ...queues.keys import Partition
from ...queues.producer import Producer
from ...queues.records import State
from ...queues.security.encryption import ERROR, MESSAGE, event_field
from ...queues.sessions.address import parse_turn_id
from ...queues.transport.gateway import Gateway
from ...queues.transport.large_results import scan_fields, scan_results
from ...queues.transport.scripts import pairs
from ..artifacts.links import task_links
from ..artifacts.store import ArtifactStore
from ..durable.task_memory import CITED_MEMORIES, cited_memories
from ..durable.task_workspace import task_workspace_files
from ..errors import TransferError
from ..journal.run_events import Exported
from ..memory.hybrid import HybridStore
from .lines import FORMAT, VERSION, LineWriter

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
        cited: Number of the memories that the task has stored, found or had in a prompt.
        memories: Number of those that the file has.
    """

    handle: TaskHandle[object]
    digest: str
    mark: tuple[bytes, ...]
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
) -> ExportedTask:
    """Write a task to a file, decrypted.

    Args:
        memories: Opens the store of the memories that the task cites, or nothing; without it the file has none.

    Raises:
        TransferError: The task runs, is queued, has ended or has not started, or changed meanwhile.
        DecryptionError, ArtifactError, MemoryStoreError
    """
    gateway, partition, task_id = producer.gateway, handle.partition, handle.id
    mark = await read_mark(gateway, partition, task_id)
    await _check(handle, mark)
    origin = await read_task_input(gateway, partition, task_id)
    record = partition.record(task_id)
    data_format = await gateway.command("HGET", record, "format")
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
        state=mark[0].decode(),
        events=int(mark[1] or 0),
        entries=int(mark[2] or 0),
        data_format=None if data_format is None else int(data_format),
        envelope=orjson.loads(origin.stored),
    )
    out.write("arguments", origin.arguments)
    async for key, value in scan_results(gateway, partition, task_id):
        out.write("checkpoint", value, name=f"d:{key}")
    cited = await _write_fields(gateway, partition, task_id, out)
    await _write_inbox(gateway, partition, task_id, out)
    events = await _write_log(gateway, partition, task_id, out)
    artifacts = await _write_artifacts(gateway, partition, task_id, store, out)
    written = await _write_memories(memories, cited, out) if memories is not None and cited else 0
    if await read_mark(gateway, partition, task_id) != mark:
        raise TransferError(f"task {task_id} changed while it was exported: export it again")
    return ExportedTask(handle, out.end(), mark, events, artifacts, len(cited), written)


async def _check(handle: TaskHandle[object], mark: tuple[bytes, ...]) -> None:
    state, task_id = mark[0], handle.id
    if state not in (b"scheduled", b"dead"):
        shown = (await handle.status()).value
        advice = "wait until it waits" if shown in (State.QUEUED, State.RUNNING) else "only its result is left"
        if shown == State.RUNNING:
            advice += f", or end it with 'perdure task cancel {task_id}'"
        raise TransferError(
            f"task {task_id} cannot be exported while it is {shown}; it must be waiting, scheduled or a dead letter: "
            f"{advice}"
        )
    if parse_turn_id(task_id) is not None:
        raise TransferError(f"task {task_id} is a turn of a session: see 'perdure session export'")
    if not int(mark[2] or 0):
        raise TransferError(f"task {task_id} has not started: enqueue it on the other deployment instead")


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
        data = value
        if name.startswith("m:"):
            at, space, message = value.partition(b" ")
            data = at + space + cipher.decrypt(MESSAGE, message)
        out.write("inbox", data, name=name)


async def _write_log(gateway: Gateway, partition: Partition, task_id: str, out: LineWriter) -> int:
    cipher, after, count = gateway.encryptor.of(partition, task_id), "0-0", 0
    while True:
        page = await gateway.command("XRANGE", partition.log(task_id), f"({after}", "+", "COUNT", _PAGE)
        for entry, values in page:
            fields = pairs(values)
            data = fields.pop(b"data", None)
            if data is not None:
                number = fields.get(b"n")
                data = cipher.decrypt(ERROR if number is None else event_field(int(number)), data, plain=True)
            named = {name.decode(): value.decode() for name, value in fields.items()}
            out.write("event", data, id=entry.decode(), fields=named)
        count += len(page)
        if len(page) < _PAGE:
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
