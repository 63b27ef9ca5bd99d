"""`perdure artifacts list` and `gc`: artifacts of a deployment; `perdure task artifact`: artifacts of one task."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import anyio.to_thread
import typer

from ...queues.inspection.views import linked_objects
from ...queues.producer import Producer
from ...queues.wording import duration
from ..artifacts.backend import StoredObject
from ..artifacts.links import ArtifactLink, all_links, orphans, task_links
from ..artifacts.store import ArtifactStore, artifact_store
from ..settings import load_settings
from ..shown_task import damaged_links, describe_link
from ..workspace.shared_workspace import shared_hashes
from ..workspace.task_workspace import workspace_hashes
from .support.connection import ConnectionOptions, TaskOptions, TenantOptions, connected, where
from .support.errors import Failed, Misuse
from .support.options import DryRun, in_duration
from .support.output import AsJson, Bar, CleanStdout, Column, note
from .support.runner import Listing, Output, command

_UNITS: Final = (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000))

STDOUT: Final = "-"


@command
async def artifact(
    place: TenantOptions,
    task: TaskOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the artifact. Default: list all.")
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Path of the file; - for stdout. Default: a file with the artifact's name in this folder.",
        ),
    ] = None,
    json: AsJson = False,
) -> Output | None:
    """List the artifacts of a task, or fetch one of them.

    The hash is checked before anything is written: the file is replaced
    completely or not at all.

    Example: perdure task artifact 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f report.md -o -
    """
    if name is None and output is not None:
        raise Misuse("--output needs a NAME, as 'perdure task artifact ID' lists them")
    if name is not None and json:
        raise Misuse("--json is for the list: use --output - to print an artifact")
    async with place.producer() as producer:
        handle = await task.find(producer)
        damaged: list[str] = []
        links = await task_links(producer.gateway, handle.partition, handle.id, damaged)
        note_damaged(damaged)
        if name is None:
            empty = f"task {handle.id} has no artifacts"
            return Listing(_COLUMNS, links, empty=empty, data=list(map(describe_link, links)))
        link = next((link for link in links if link.name == name), None)
        if link is None:
            names = ", ".join(repr(link.name) for link in links) or "none"
            raise Failed(f"task {handle.id} has no artifact {name!r}; its artifacts: {names}")
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        what = f"artifact {name!r} of task {handle.id}"
        if output == STDOUT:
            await _print(store, what, link)
            return None
        to = _target(link.name, output)
        await store.fetch(what, link.hash, link.size, to)
    return Output(None, str(to), notes=[f"{what}: {size_text(link.size)}, SHA-256 {link.hash}"])


def size_text(size: int) -> str:
    """Return a number of bytes in the largest unit that gives at least one."""
    for unit, length in _UNITS:
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"


_COLUMNS: Final[Sequence[Column[ArtifactLink]]] = (
    Column("name", lambda link: link.name),
    Column("size", lambda link: size_text(link.size), right=True),
    Column("media type", lambda link: link.media_type),
    Column("sha-256", lambda link: link.hash, least=12, fold=True),
)


def note_damaged(damaged: Sequence[str]) -> None:
    """Print the problems of links that are left out."""
    for problem in damaged_links(damaged):
        note(problem)


def _target(name: str, output: str | None) -> Path:
    """Return the path for the artifact. An existing file is replaced only if `--output` names it."""
    if output is None:
        target = Path(name)
        if target.exists():
            raise Failed(f"file {name!r} exists already: give it with --output to replace it")
        return target
    target = Path(output)
    if target.is_dir():
        raise Misuse(f"--output must be a file, got the folder {output!r}: give {str(target / name)!r}")
    return target


async def _print(store: ArtifactStore, what: str, link: ArtifactLink) -> None:
    """Print an artifact, through a temporary file, so that its hash is checked before the first byte is printed."""
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        file = Path(folder) / "fetched"
        await store.fetch(what, link.hash, link.size, file)
        await anyio.to_thread.run_sync(_copy_to_stdout, file)


def _copy_to_stdout(file: Path) -> None:
    out = CleanStdout()
    try:
        with file.open("rb") as source:
            shutil.copyfileobj(source, out)
        out.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:  # the reader has closed the pipe
            raise Failed(f"could not write to stdout: {error}") from error


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def artifacts() -> None:
    """List the artifacts of tasks, and delete unlinked ones."""


@app.command("list")
@connected
async def list_(
    producer: Producer,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N artifacts.")] = 1000,
) -> Output:
    """List the artifacts of all tasks, in no particular order.

    With --json: one object per line.

    Example: perdure artifacts list
    """
    found: dict[tuple[str, str], tuple[str, ArtifactLink]] = {}
    damaged: list[str] = []
    async for partition, task_id, links in all_links(producer.gateway, producer.namespace, damaged):
        for link in links[: limit - len(found)]:
            found[task_id, link.name] = (partition.queue, link)  # SCAN may find a task twice
        if len(found) == limit:
            break
    note_damaged(list(dict.fromkeys(damaged)))
    return Listing(
        [Column("task", lambda row: row[0]), *(_of_link(column) for column in _COLUMNS)],
        [(task_id, link) for (task_id, _), (_, link) in found.items()],
        empty=f"no artifacts of tasks {where(producer)}",
        data=[{"task": task, "queue": queue, **describe_link(link)} for (task, _), (queue, link) in found.items()],
        notes=[f"there may be more than {limit} artifacts: raise --limit to see them" if len(found) == limit else None],
        lines=True,
    )


def _of_link(column: Column[ArtifactLink]) -> Column[tuple[str, ArtifactLink]]:
    cell = column.cell
    return Column(column.name, lambda row: cell(row[1]), right=column.right, least=column.least, fold=column.fold)


@app.command()
@command
async def gc(
    place: ConnectionOptions,
    *,
    grace: Annotated[
        float,
        in_duration("Keep artifacts that were saved within this time: 24h, 30m, 7d, or seconds.", default="24h"),
    ] = 86_400.0,
    dry_run: DryRun = False,
) -> AsyncIterator[Output]:
    """Delete artifacts that no task links, and print their hashes.

    A run that dies between saving and linking leaves such artifacts, and so
    does a task whose record expires. Run it at any time, also while workers
    run: artifacts that were saved within the grace are kept.

    Example: perdure artifacts gc --dry-run
    """
    found: list[StoredObject] = []
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with Bar("looking at tasks", rest="the same command deletes the rest") as bar:
            async for orphan in orphans(store, lambda: _linked(producer, store, bar), grace=grace):
                if dry_run or await store.remove(orphan.hash, grace):
                    found.append(orphan)
                    yield Output((), orphan.hash, lines=True)
        drafts = 0 if dry_run else await store.remove_stale_uploads(grace)
    size = sum(orphan.size for orphan in found)
    done = "would delete" if dry_run else "deleted"
    rest = f", and {drafts} incomplete uploads" if drafts else ""
    yield Output(
        {
            "dry_run": dry_run,
            "store": store.shown,
            "count": len(found),
            "size": size,
            "orphans": [{"hash": one.hash, "size": one.size, "modified": one.modified} for one in found],
        },
        notes=[
            f"{done} {len(found)} unlinked artifacts ({size_text(size)}) in {store.shown}{rest}",
            f"all of them were saved more than {duration(grace)} ago" if found and dry_run else None,
        ],
    )


async def _linked(producer: Producer, store: ArtifactStore, bar: Bar) -> AsyncIterator[str]:
    """Yield the hashes that are linked: by artifacts of tasks, by their workspaces, by shared ones, by large values."""
    async for _, _, links in all_links(producer.gateway, producer.namespace):
        bar.advance()
        for link in links:
            yield link.hash
    async for digest in workspace_hashes(producer.gateway, producer.namespace, store):
        yield digest
    async for digest in shared_hashes(producer.gateway, producer.namespace):
        yield digest
    async for digest in linked_objects(producer.gateway, producer.namespace):
        yield digest
