"""`perdure task export` and `import`: move a task to another deployment."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, cast

import typer

from ....queues.private_files import replaced_file
from ....queues.producer import Producer
from ....queues.records import State
from ....queues.wording import duration
from ...artifacts.store import artifact_store
from ...errors import MemoryStoreMissing
from ...memory.factory import make_store
from ...memory.hybrid import HybridStore
from ...settings import Settings
from ...transfer.archive import ENDED, Wanted, archive_tasks
from ...transfer.export import ExportedTask, close_source, export_task
from ...transfer.import_ import import_task
from ..memory.commands import StorePlace, store_settings, without_embedder
from ..support.connection import TaskOptions, TenantOptions, known_partitions, redis_now
from ..support.errors import Failed, Misuse
from ..support.options import InQueue, TaskNameOption, in_duration, opened, read_task_id
from ..support.output import Bar, CleanStdout, note, print_text
from ..support.runner import Output, command


@command
async def export(
    place: TenantOptions,
    task_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", parser=read_task_id, help="Id of the task.", show_default=False)
    ] = None,
    *,
    queue: InQueue = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="Path of the file; with --older of the folder. Default: stdout."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not cancel the task here: it may then run at both places.")
    ] = False,
    older: Annotated[
        float | None,
        in_duration("Archive all tasks that ended longer ago than this: a file for each in the folder of -o."),
    ] = None,
    state: Annotated[
        list[State] | None,
        typer.Option(help="With --older: only tasks that are succeeded, dead or cancelled. Repeatable."),
    ] = None,
    task_name: TaskNameOption = None,
    memory: StorePlace = None,
    no_memories: Annotated[bool, typer.Option("--no-memories", help="Leave the memories out.")] = False,
) -> None:
    """Write a task that does not run to a file, and cancel it here.

    The file has its arguments, state, step records, log, messages, artifacts
    and workspace, and the memories that it has stored, found or had in a
    prompt, for 'perdure task import' on another deployment.
    It holds the data IN CLEAR, also if it is encrypted here.

    The task is cancelled once the file is on the disk, if nothing has changed
    it meanwhile. If stdout is a pipe, it is not cancelled. A task that has
    succeeded or was cancelled is written with its outcome.

    Example: perdure task export 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f -o agent.jsonl

    With --older, each task that ended longer ago is written to
    FOLDER/YYYY-MM-DD/ID.jsonl, by the day of its end (UTC), and stays in Redis
    until its time is over. A command that was cut off can be given again: it
    writes the files that are missing.

    Example: perdure task export --older 7d --state succeeded -o archive
    """
    settings = store_settings(**place.overrides(), memory=memory)
    memories = None if no_memories else partial(_existing_memories, settings)
    if older is not None:
        wanted = _check_archive(task_id, output, keep, state)
        async with place.producer() as producer:
            before = await redis_now(producer) - round(older * 1000)
            await known_partitions(producer, queue)
            await _archive(producer, settings, Wanted(before, wanted, task_name, queue), cast("Path", output), memories)
            _note_retention(older, wanted, settings)
        return
    if task_id is None:
        raise Misuse("give the ID of a task, or --older and -o FOLDER for all that ended longer ago")
    if state or task_name is not None:
        raise Misuse("--state and --task are for --older: they select tasks that have ended")
    async with place.producer() as producer:
        handle = await TaskOptions(task_id, queue).find(producer)
        store = await artifact_store(producer.gateway, settings)
        with _written(output) as file:
            exported = await export_task(producer, handle, store, file, memories)
            stored = _is_file(file)
        note(
            f"exported task {handle.id}: {exported.events} events, {exported.artifacts} artifacts and files, "
            f"{exported.memories} memories, in clear"
        )
        if missing := exported.cited - exported.memories:
            note(_memories_left_out(exported.cited, missing, settings, no_memories))
        if exported.ended:
            note("the task has ended: there was nothing to cancel here")
        elif keep:
            note(_may_run_twice(handle.id))
        elif not stored:
            note(f"stdout is not a file, so the task was not cancelled here; {_may_run_twice(handle.id)}")
        elif not await close_source(producer, exported):
            raise Failed(_changed(exported))
        else:
            note("the task is cancelled here")


def _check_archive(task_id: str | None, folder: Path | None, keep: bool, states: list[State] | None) -> list[State]:
    """Return the states of the tasks to archive. Raises `Misuse` for options that do not go with --older."""
    if task_id is not None:
        raise Misuse("give either an ID, or --older")
    if folder is None:
        raise Misuse("--older writes a file for each task: give their folder with -o FOLDER")
    if keep:
        raise Misuse("--keep is for a task that continues: what --older archives stays here anyway")
    if folder.exists() and not folder.is_dir():
        raise Misuse(f"{folder} is not a folder: give another one with -o")
    for state in states or ():
        if state not in ENDED:
            raise Misuse(f"--state {state.value}: with --older it must be succeeded, dead or cancelled")
    return states or list(ENDED)


async def _archive(
    producer: Producer,
    settings: Settings,
    wanted: Wanted,
    folder: Path,
    memories: Callable[[], AbstractAsyncContextManager[HybridStore | None]] | None,
) -> None:
    """Archive the tasks; print the path of each new file, and each task that could not be exported."""
    store = await artifact_store(producer.gateway, settings)
    new = known = failed = missing = 0
    try:
        with Bar("archiving", rest="the same command archives the rest") as bar:
            async for archived in archive_tasks(producer, store, folder, wanted, memories):
                bar.advance()
                missing += archived.missing
                if archived.path is None:
                    failed += 1
                    note(f"task {archived.task_id} was not archived: {archived.problem}")
                elif archived.new:
                    new += 1
                    print_text(str(archived.path))
                else:
                    known += 1
    except OSError as error:
        raise Failed(
            f"could not write {error.filename or folder}: {error.strerror or error}; tasks archived before: {new:,}; "
            "the same command archives the rest"
        ) from None
    before = f"; archived before: {known:,}" if known else ""
    note(f"tasks archived in {folder}, in clear: {new:,}{before}")
    if missing and memories is not None:
        note(f"{missing:,} memories that the tasks cite are not in the files: the memory store does not have them")
    if failed:
        raise Failed(f"{failed:,} tasks could not be archived; the others were")


def _note_retention(older: float, states: list[State], settings: Settings) -> None:
    """Say which tasks do not stay long enough in Redis to become that old."""
    for state in states:
        dead = state is State.DEAD
        kept = settings.dead_letter_ttl if dead else settings.result_ttl
        if older >= kept:
            name = "PERDURE_DEAD_LETTER_TTL" if dead else "PERDURE_RESULT_TTL"
            note(
                f"no {state.value} task can be that old: it is deleted {duration(kept)} after its end ({name}), unless "
                "the task has a longer time of its own: archive with a shorter --older"
            )


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
    place: TenantOptions,
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
    waiting, it waits again. One that has ended is stored for reading, with its
    result or error; a dead letter of an archive is a dead letter again, which
    'perdure dlq replay' continues. The whole file is checked before anything is
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
            kept = settings.dead_letter_ttl
            found = await import_task(producer, store, file, new_id=new_id, memories=memories, retention=kept)
    imported = (
        f"imported task {found.source} ({found.task}): {found.events} events, {found.artifacts} artifacts and files, "
        f"{found.new_memories} new of {found.memories} memories"
    )
    if found.ended:
        imported += f"; it is {found.was}, and is kept here for reading"
    return Output(
        {
            "id": found.handle.id,
            "source": found.source,
            "task": found.task,
            "queue": found.handle.partition.queue,
            "ended": found.ended,
            "events": found.events,
            "artifacts": found.artifacts,
            "memories": found.memories,
            "new_memories": found.new_memories,
        },
        found.handle.id,
        notes=[imported],
    )
