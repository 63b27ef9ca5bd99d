"""`perdure task versions`: which versions of a task's code are still needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ....queues.durations import iso_time
from ....queues.inspection.views import resumable_tasks
from ....queues.presence import list_workers
from ....queues.producer import Producer
from ....queues.records import State
from ...journal.step_record import VERSION
from ..support.connection import connected
from ..support.errors import Failed
from ..support.options import AppOption
from ..support.output import AsJson, note, print_json, print_text, timestamp
from ..support.tables import Column, Wide, print_list


@dataclass(slots=True)
class VersionUse:
    """Use of one version of a task's code.

    Attributes:
        workers: Workers that run it now.
        live: Tasks that have not ended and began with it.
        oldest: Time at which the oldest of these was enqueued, in milliseconds.
        dead: Dead letters that began with it.
    """

    task: str
    version: int
    workers: int = 0
    live: int = 0
    oldest: int | None = None
    dead: int = 0


@connected
async def versions(
    producer: Producer,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only the tasks of this name.")] = None,
    *,
    app: AppOption = None,
    wide: Wide = False,
    json: AsJson = False,
) -> None:
    """List the versions of code that tasks began with, and say which can go.

    Without NAME, tasks with no version other than 1 are left out. Reads the
    records of all tasks that have a checkpoint and have not succeeded, page by
    page.

    Example: perdure task versions report
    """
    uses = {task: used for task, used in (await _read(producer, app)).items() if _is_shown(used, task, name)}
    if name is not None and not uses:
        raise Failed(f"no live worker has task {name!r}, and no task of this name has a checkpoint to resume")
    if json:
        print_json([_described(task, used) for task, used in uses.items()])
    elif uses:
        print_list(_COLUMNS, [use for used in uses.values() for use in used], wide=wide)
        for task, used in uses.items():
            for text in advice(task, used):
                print_text(text)
    else:
        note(f"no task in namespace {producer.namespace.name!r} has a version other than 1")


_COLUMNS: Sequence[Column[VersionUse]] = (
    Column("task", lambda use: use.task, least=8),
    Column("version", lambda use: str(use.version), right=True),
    Column("workers", lambda use: str(use.workers), right=True),
    Column("live tasks", lambda use: str(use.live), right=True),
    Column("oldest", lambda use: timestamp(use.oldest) or ""),
    Column("dead letters", lambda use: str(use.dead), right=True),
)


def advice(task: str, uses: Sequence[VersionUse]) -> list[str]:
    """Return what keeps each version but the newest, in sentences, and which branches of the code can be deleted."""
    newest = max(use.version for use in uses)
    found, lowest = [], newest
    for use in uses:
        what = f"version {use.version} of {task!r}"
        if use.version == newest or not (use.live or use.dead or use.workers):
            continue
        lowest = min(lowest, use.version)
        if use.live:
            needs = "task still needs" if use.live == 1 else "tasks still need"
            found.append(f"{use.live} {needs} {what}, the oldest since {timestamp(use.oldest) or 'an unknown time'}")
        if use.dead:
            letters = "dead letter" if use.dead == 1 else "dead letters"
            found.append(f"{use.dead} {letters} began with {what}: replay or purge them before its branch is deleted")
        if use.workers:
            runs = "worker still runs" if use.workers == 1 else "workers still run"
            found.append(f"{use.workers} {runs} {what}: new tasks may begin with it")
    if lowest == 2:
        found.append(f"the branch for version 1 of {task!r} can be deleted: no live task began with it")
    elif lowest > 2:
        which = f"versions below {lowest} of {task!r}"
        found.append(f"the branches for {which} can be deleted: no live task began with them")
    return found


def _described(task: str, uses: Sequence[VersionUse]) -> dict[str, object]:
    listed = [asdict(use) | {"oldest": iso_time(use.oldest)} for use in uses]
    for one in listed:
        del one["task"]
    return {"task": task, "versions": listed, "advice": advice(task, uses)}


def _is_shown(uses: Sequence[VersionUse], task: str, name: str | None) -> bool:
    return task == name if name is not None else any(use.version > 1 for use in uses)


async def _read(producer: Producer, app: str | None) -> Mapping[str, list[VersionUse]]:
    """Return the uses by task, each by version. app: only its workers and tasks."""
    found: dict[tuple[str, int], VersionUse] = {}

    def use_of(task: str, version: int) -> VersionUse:
        return found.setdefault((task, version), VersionUse(task, version))

    for (task, version), count in (await _running(producer, app)).items():
        use_of(task, version).workers = count
    known: set[str] = set()
    async for record, stored in resumable_tasks(producer.gateway, producer.namespace, VERSION):
        if record.problem is not None and record.id not in known:
            known.add(record.id)
            note(f"task {record.id} is left out: {record.problem}")
        if record.id in known or record.task is None or app not in (None, record.app):
            continue
        known.add(record.id)
        use = use_of(record.task, int(stored) if stored is not None and stored.isdigit() else 1)
        if record.state is State.DEAD:
            use.dead += 1
        elif not record.state.terminal:
            use.live += 1
            use.oldest = min(filter(None, (use.oldest, record.enqueued_at)), default=None)
    return _by_task(found.values())


async def _running(producer: Producer, app: str | None) -> Counter[tuple[str, int]]:
    """Return the number of workers by task and version."""
    listed = (await producer.catalog()).all_versions
    running: Counter[tuple[str, int]] = Counter()
    for worker in await list_workers(producer.gateway, producer.namespace):
        if not worker.presumed_dead and worker.runs(app):
            entry = (worker.app, worker.catalog)
            running.update((task.name, task.task_version) for task in listed if (task.app, task.version) == entry)
    return running


def _by_task(uses: Iterable[VersionUse]) -> dict[str, list[VersionUse]]:
    found: dict[str, list[VersionUse]] = {}
    for use in sorted(uses, key=lambda use: (use.task, use.version)):
        found.setdefault(use.task, []).append(use)
    return found
