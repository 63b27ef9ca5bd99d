"""Archive of tasks that have ended: a file for each, by the day of its end."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, NamedTuple

import orjson

from ...queues.errors import PerdureError, Unavailable
from ...queues.handle import TaskHandle
from ...queues.inspection.views import list_tasks
from ...queues.private_files import replaced_file
from ...queues.producer import Producer
from ...queues.records import Record, State
from ..artifacts.store import ArtifactStore
from ..errors import TransferError
from .export import OpensMemories, export_task

ENDED: Final = (State.SUCCEEDED, State.DEAD, State.CANCELLED)

_TOGETHER: Final = 16
"""Tasks that are exported at the same time."""

_IN_MEMORY: Final = 1 << 20
"""Bytes of an export that are held in memory until its file is written."""

_HEADER: Final = 1 << 24
"""Largest header of a file that is compared, in bytes."""


class ArchivedTask(NamedTuple):
    """A task that an archive has, or that could not be exported.

    Attributes:
        path: Its file; None if it could not be exported.
        new: Whether the file was written now.
        problem: Why it could not be exported.
        missing: Number of memories that it cites and the file does not have.
    """

    task_id: str
    path: Path | None = None
    new: bool = False
    problem: str = ""
    missing: int = 0


class Wanted(NamedTuple):
    """Selection of tasks that have ended. before: milliseconds of Redis' clock."""

    before: int
    states: Sequence[State] = ENDED
    task: str | None = None
    queue: str | None = None


async def archive_tasks(
    producer: Producer, store: ArtifactStore, folder: Path, wanted: Wanted, memories: OpensMemories | None = None
) -> AsyncIterator[ArchivedTask]:
    """Write each task that ended before a time to `FOLDER/YYYY-MM-DD/ID.jsonl`; yield what became of it.

    The tasks stay where they are, also dead letters. A task whose file is there is left alone, so that an archive that
    was cut off can be continued: a file has its name once it is complete and on the disk. An error of a task hides no
    other one.

    Raises:
        OSError: A file cannot be written.
        Unavailable: Redis cannot be reached.
    """
    place = (producer.gateway, producer.namespace)
    found = list_tasks(*place, queue=wanted.queue, states=wanted.states, task=wanted.task)
    batch: list[Record] = []
    async for record in found:
        if not record.problem and (record.finished_at is None or record.finished_at >= wanted.before):
            continue
        batch.append(record)
        if len(batch) == _TOGETHER:
            for archived in await _archive(producer, store, folder, batch, memories):
                yield archived
            batch = []
    for archived in await _archive(producer, store, folder, batch, memories):
        yield archived


async def _archive(
    producer: Producer, store: ArtifactStore, folder: Path, records: Sequence[Record], memories: OpensMemories | None
) -> list[ArchivedTask]:
    once = {(record.queue, record.id): record for record in records}.values()  # SCAN may return a key twice
    return await asyncio.gather(*(_archive_one(producer, store, folder, record, memories) for record in once))


async def _archive_one(
    producer: Producer, store: ArtifactStore, folder: Path, record: Record, memories: OpensMemories | None
) -> ArchivedTask:
    if record.problem or record.finished_at is None:
        return ArchivedTask(record.id, problem=record.problem or "the time of its end is missing")
    path, complete = await asyncio.to_thread(_place, folder, record, record.finished_at)
    if complete:
        return ArchivedTask(record.id, path)
    partition = producer.namespace.partition(record.queue, record.partition)
    handle = TaskHandle[object](record.id, partition, producer.gateway, producer.notifications)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        try:
            exported = await export_task(producer, handle, store, file, memories, archived=True)
            if not exported.ended:
                raise TransferError(f"task {record.id} has not ended any more: it was replayed or enqueued again")
        except Unavailable:
            raise
        except PerdureError as error:
            return ArchivedTask(record.id, problem=str(error))
        new = await asyncio.to_thread(_save, file, path)
    return ArchivedTask(record.id, path, new, missing=exported.cited - exported.memories)


def _place(folder: Path, record: Record, finished: int) -> tuple[Path, bool]:
    """Return the path for a task, and whether its file is there.

    Another task may have had the id, or may have it in another queue: the second one has a name that no id is.
    """
    try:
        day = datetime.fromtimestamp(finished / 1000, UTC).date().isoformat()
    except (OSError, OverflowError, ValueError):
        day = "unknown"
    path = folder / day / f"{record.id}.jsonl"
    if _is_of(path, record, finished) is False:
        path = folder / day / f"{record.id}~{record.queue}-{finished}.jsonl"
    return path, path.exists()


def _is_of(path: Path, record: Record, finished: int) -> bool | None:
    """Return whether a file is that of a task; None without one."""
    try:
        with path.open("rb") as file:
            header = orjson.loads(file.readline(_HEADER))
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        return False
    expected = {"id": record.id, "queue": record.queue, "finished": finished}
    return isinstance(header, dict) and {name: header.get(name) for name in expected} == expected


def _save(file: IO[bytes], path: Path) -> bool:
    """Write a file. Return False if another archive has written it meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.seek(0)
    try:
        with replaced_file(path, new=True) as target:
            shutil.copyfileobj(file, target)
    except FileExistsError:
        return False
    return True
