"""`perdure task export` and `import`: move a task to another deployment."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, cast

import anyio
import typer

from ...artifacts import artifact_store
from ...settings import load_settings
from ...transfer import ExportedTask, close_source, export_task, import_task
from ..support.connection import ConnectionOptions, find_handle, with_connection_options
from ..support.errors import Failed, Misuse
from ..support.options import OutputFile, TaskId, read_task_id
from ..support.output import AsJson, note, print_data, print_json

__all__ = ["export", "import_"]


@with_connection_options
def export(
    place: ConnectionOptions,
    task_id: TaskId,
    *,
    output: OutputFile = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not cancel the task here: it may then run at both places.")
    ] = False,
) -> None:
    """Write a task that waits or is a dead letter to a file, and cancel it here.

    The file has its arguments, state, step records, log, messages, artifacts
    and workspace, for 'perdure task import' on another deployment.
    It holds the data IN CLEAR, also if it is encrypted here.

    The task is cancelled once the file is on the disk, if nothing has changed
    it meanwhile. If stdout is a pipe, it is not cancelled.

    Example: perdure task export 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f -o agent.jsonl
    """
    anyio.run(_export, place, task_id, output, keep)


async def _export(place: ConnectionOptions, task_id: str, output: Path | None, keep: bool) -> None:
    async with place.producer() as producer:
        handle = await find_handle(producer, task_id)
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with _written(output) as file:
            exported = await export_task(producer, handle, store, file)
            stored = _is_file(file)
        note(
            f"exported task {task_id}: {exported.events} events and {exported.artifacts} artifacts and files, in clear"
        )
        if keep:
            note(_may_run_twice(task_id))
        elif not stored:
            note(f"stdout is not a file, so the task was not cancelled here; {_may_run_twice(task_id)}")
        elif not await close_source(producer, exported):
            raise Failed(_changed(exported))
        else:
            note("the task is cancelled here")


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
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        with suppress(OSError, ValueError):  # a pipe
            os.fsync(sys.stdout.buffer.fileno())
        return
    if path.exists():
        raise Failed(f"{path} exists already: give another file with --output")
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=".export-")
        try:
            with os.fdopen(number, "wb") as file:
                yield file
                file.flush()
                os.fsync(number)
            os.link(name, path)
            _sync_folder(path.parent)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"could not write {path}: {error.strerror}") from None


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _is_file(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):
        return False


@with_connection_options
def import_(
    place: ConnectionOptions,
    source: Annotated[str, typer.Argument(metavar="FILE", help="File of 'perdure task export'; - for stdin.")],
    *,
    new_id: Annotated[
        str | None,
        typer.Option("--id", metavar="NEW", parser=read_task_id, help="Id of the task here. Default: the same."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Store a task that another deployment exported, and print its id.

    It is queued at once and resumes after its last recorded step; if it was
    waiting, it waits again. The whole file is checked before anything is
    stored. With --id, repeated steps have new idempotency keys.

    Example: perdure task import agent.jsonl
    """
    anyio.run(_import, place, source, new_id, json)


async def _import(place: ConnectionOptions, source: str, new_id: str | None, json: bool) -> None:
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with _opened(source) as file:
            found = await import_task(producer, store, file, new_id=new_id)
    if json:
        print_json(
            {
                "id": found.handle.id,
                "source": found.source,
                "task": found.task,
                "queue": found.handle.partition.queue,
                "events": found.events,
                "artifacts": found.artifacts,
            }
        )
    else:
        print_data(found.handle.id)
    note(f"imported task {found.source} ({found.task}): {found.events} events, {found.artifacts} artifacts and files")


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    """Open the file to read; stdin as a temporary file, because it is read twice."""
    if source == "-":
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.seek(0)
            yield cast("IO[bytes]", copy)
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 - closed below; only its opening is misuse
    except OSError as error:
        raise Misuse(f"could not read {source}: {error.strerror}") from None
    with file:
        yield file
