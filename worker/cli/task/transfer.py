"""`perdure task export` and `import`: move a task to another deployment."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, cast

import typer

from ....queues.private_files import replaced_file
from ...artifacts.store import artifact_store
from ...errors import MemoryStoreMissing
from ...memory.factory import make_store
from ...memory.hybrid import HybridStore
from ...settings import Settings
from ...transfer.export import ExportedTask, close_source, export_task
from ...transfer.import_ import import_task
from ..memory.commands import StorePlace, store_settings, without_embedder
from ..support.connection import ConnectionOptions, TaskOptions
from ..support.errors import Failed
from ..support.options import OutputFile, opened, read_task_id
from ..support.output import CleanStdout, note
from ..support.runner import Output, command


@command
async def export(
    place: ConnectionOptions,
    task: TaskOptions,
    *,
    output: OutputFile = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not cancel the task here: it may then run at both places.")
    ] = False,
    memory: StorePlace = None,
    no_memories: Annotated[bool, typer.Option("--no-memories", help="Leave the memories out.")] = False,
) -> None:
    """Write a task that waits or is a dead letter to a file, and cancel it here.

    The file has its arguments, state, step records, log, messages, artifacts
    and workspace, and the memories that it has stored, found or had in a
    prompt, for 'perdure task import' on another deployment.
    It holds the data IN CLEAR, also if it is encrypted here.

    The task is cancelled once the file is on the disk, if nothing has changed
    it meanwhile. If stdout is a pipe, it is not cancelled.

    Example: perdure task export 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f -o agent.jsonl
    """
    settings = store_settings(**place.overrides(), memory=memory)
    async with place.producer() as producer:
        handle = await task.find(producer)
        store = await artifact_store(producer.gateway, settings)
        memories = None if no_memories else partial(_existing_memories, settings)
        with _written(output) as file:
            exported = await export_task(producer, handle, store, file, memories)
            stored = _is_file(file)
        note(
            f"exported task {handle.id}: {exported.events} events, {exported.artifacts} artifacts and files, "
            f"{exported.memories} memories, in clear"
        )
        if missing := exported.cited - exported.memories:
            note(_memories_left_out(exported.cited, missing, settings, no_memories))
        if keep:
            note(_may_run_twice(handle.id))
        elif not stored:
            note(f"stdout is not a file, so the task was not cancelled here; {_may_run_twice(handle.id)}")
        elif not await close_source(producer, exported):
            raise Failed(_changed(exported))
        else:
            note("the task is cancelled here")


@asynccontextmanager
async def _existing_memories(settings: Settings) -> AsyncIterator[HybridStore | None]:
    store = make_store(without_embedder(settings))
    try:
        await store.open(create=False)
    except MemoryStoreMissing:
        yield None
        return
    try:
        yield store
    finally:
        await store.close()


def _memories_left_out(cited: int, missing: int, settings: Settings, no_memories: bool) -> str:
    text = f"{missing} of {cited} memories that the task cites are not in the file"
    if no_memories:
        return f"{text}, because of --no-memories"
    place = make_store(without_embedder(settings)).place
    return (
        f"{text}: the memory store {place} does not have them; if they are in another one, export the task again with "
        "--memory PLACE, or move them with 'perdure memory export' and 'perdure memory add --file'"
    )


def _may_run_twice(task_id: str) -> str:
    return f"it may run at both places: to end it here, 'perdure task cancel {task_id}'"


def _changed(exported: ExportedTask) -> str:
    return (
        f"task {exported.handle.id} changed after it was read, and was not cancelled here: "
        "do not import the file, and export the task again"
    )


@contextmanager
def _written(path: Path | None) -> Iterator[IO[bytes]]:
    """Open the file to write to, for its owner only. It has its name once it is complete and on the disk."""
    if path is None:
        out = CleanStdout()
        yield cast("IO[bytes]", out)
        out.flush()
        with suppress(OSError, ValueError):  # a pipe
            os.fsync(sys.stdout.buffer.fileno())
        return
    try:
        with replaced_file(path, new=True) as file:
            yield file
    except FileExistsError:
        raise Failed(f"{path} exists already: give another file with --output") from None
    except OSError as error:
        raise Failed(f"could not write {path}: {error.strerror or error}") from None


def _is_file(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):
        return False


@command
async def import_(
    place: ConnectionOptions,
    source: Annotated[str, typer.Argument(metavar="FILE", help="File of 'perdure task export'; - for stdin.")],
    *,
    new_id: Annotated[
        str | None,
        typer.Option("--id", metavar="NEW", parser=read_task_id, help="Id of the task here. Default: the same."),
    ] = None,
    memory: StorePlace = None,
    no_memories: Annotated[bool, typer.Option("--no-memories", help="Do not store the memories.")] = False,
) -> Output:
    """Store a task that another deployment exported, and print its id.

    It is queued at once and resumes after its last recorded step; if it was
    waiting, it waits again. The whole file is checked before anything is
    stored. With --id, repeated steps have new idempotency keys.

    The memories of the file are stored first, with the same owner, subject,
    source and times. One that the store has already stays as it is.

    Example: perdure task import agent.jsonl
    """
    settings = store_settings(**place.overrides(), memory=memory)
    memories = None if no_memories else partial(make_store, settings)
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, settings)
        with opened(source) as file:
            found = await import_task(producer, store, file, new_id=new_id, memories=memories)
    imported = (
        f"imported task {found.source} ({found.task}): {found.events} events, {found.artifacts} artifacts and files, "
        f"{found.new_memories} new of {found.memories} memories"
    )
    return Output(
        {
            "id": found.handle.id,
            "source": found.source,
            "task": found.task,
            "queue": found.handle.partition.queue,
            "events": found.events,
            "artifacts": found.artifacts,
            "memories": found.memories,
            "new_memories": found.new_memories,
        },
        found.handle.id,
        notes=[imported],
    )
