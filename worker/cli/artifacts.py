"""`perdure artifacts list` and `gc`: artifacts of a deployment; `perdure task artifact`: artifacts of one task."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import anyio
import anyio.to_thread
import typer

from ...queues.inspection.views import linked_objects
from ...queues.producer import Producer
from ...queues.wording import duration
from ..artifacts.links import ArtifactLink, all_links, orphans, task_links
from ..artifacts.store import ArtifactStore, artifact_store
from ..durable.shared_workspace import shared_hashes
from ..durable.task_workspace import workspace_hashes
from ..settings import load_settings
from .support.connection import ConnectionOptions, connected, find_handle, with_connection_options
from .support.errors import Failed, Misuse
from .support.options import InQueue, TaskId, in_duration
from .support.output import AsJson, Bar, CleanStdout, note, print_data, print_json, print_json_lines, print_table

_UNITS: Final = (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000))

STDOUT: Final = "-"


@with_connection_options
def artifact(
    place: ConnectionOptions,
    task_id: TaskId,
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
    queue: InQueue = None,
    json: AsJson = False,
) -> None:
    """List the artifacts of a task, or fetch one of them.

    The hash is checked before anything is written: the file is replaced
    completely or not at all.

    Example: perdure task artifact 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f report.md -o -
    """
    if name is None and output is not None:
        raise Misuse("--output needs a NAME, as 'perdure task artifact ID' lists them")
    if name is not None and json:
        raise Misuse("--json is for the list: use --output - to print an artifact")
    anyio.run(_run, place, task_id, queue, name, output, json)


async def _run(
    place: ConnectionOptions, task_id: str, queue: str | None, name: str | None, output: str | None, json: bool
) -> None:
    async with place.producer() as producer:
        handle = await find_handle(producer, task_id, queue)
        damaged: list[str] = []
        links = await task_links(producer.gateway, handle.partition, task_id, damaged)
        note_damaged(damaged)
        if name is None:
            _list_of_task(task_id, links, json=json)
            return
        link = next((link for link in links if link.name == name), None)
        if link is None:
            names = ", ".join(repr(link.name) for link in links) or "none"
            raise Failed(f"task {task_id} has no artifact {name!r}; its artifacts: {names}")
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        what = f"artifact {name!r} of task {task_id}"
        if output == STDOUT:
            await _print(store, what, link)
            return
        to = _target(link.name, output)
        await store.fetch(what, link.hash, link.size, to)
    print_data(str(to))
    note(f"{what}: {size_text(link.size)}, SHA-256 {link.hash}")


_SHOWN_DAMAGED: Final = 10


def note_damaged(damaged: Sequence[str]) -> None:
    """Print the problems of links that are left out."""
    for problem in damaged[:_SHOWN_DAMAGED]:
        note(problem)
    if len(damaged) > _SHOWN_DAMAGED:
        note(f"and {len(damaged) - _SHOWN_DAMAGED} more links that cannot be read")


def _list_of_task(task_id: str, links: list[ArtifactLink], *, json: bool) -> None:
    if json:
        print_json([describe_link(link) for link in links])
    elif links:
        print_table(
            ("name", "size#", "media type", "sha-256"),
            [(link.name, size_text(link.size), link.media_type, link.hash) for link in links],
        )
    else:
        note(f"task {task_id} has no artifacts")


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


def describe_link(link: ArtifactLink) -> dict[str, object]:
    """Return a link as plain data."""
    return {"name": link.name, "size": link.size, "media_type": link.media_type, "hash": link.hash}


def size_text(size: int) -> str:
    """Return a number of bytes in the largest unit that gives at least one."""
    for unit, length in _UNITS:
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"


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
    json: AsJson = False,
) -> None:
    """List the artifacts of all tasks, in no particular order.

    With --json: one object per line.

    Example: perdure artifacts list
    """
    rows: list[tuple[str, str, str, str, str]] = []
    seen: set[tuple[str, str]] = set()
    damaged: list[str] = []
    async for partition, task_id, links in all_links(producer.gateway, producer.namespace, damaged):
        for link in links:
            if len(seen) == limit or (task_id, link.name) in seen:  # SCAN may find a task twice
                continue
            seen.add((task_id, link.name))
            if json:
                print_json_lines([{"task": task_id, "queue": partition.queue, **describe_link(link)}])
            else:
                rows.append((task_id, link.name, size_text(link.size), link.media_type, link.hash))
        if len(seen) == limit:
            break
    note_damaged(list(dict.fromkeys(damaged)))
    if rows:
        print_table(("task", "name", "size#", "media type", "sha-256"), rows)
    elif not seen:
        note(f"no artifacts of tasks of namespace {producer.namespace.name!r} on {producer.address.shown}")
    if len(seen) == limit:
        note(f"there may be more than {limit} artifacts: raise --limit to see them")


@app.command()
@with_connection_options
def gc(
    place: ConnectionOptions,
    *,
    grace: Annotated[
        float,
        in_duration("Keep artifacts that were saved within this time: 24h, 30m, 7d, or seconds.", default="24h"),
    ] = 86_400.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Delete artifacts that no task links, and print their hashes.

    A run that dies between saving and linking leaves such artifacts, and so
    does a task whose record expires. Run it at any time, also while workers
    run: artifacts that were saved within the grace are kept.

    Example: perdure artifacts gc --dry-run
    """
    anyio.run(_collect, place, grace, dry_run, json)


async def _collect(place: ConnectionOptions, grace: float, dry_run: bool, json: bool) -> None:
    found: list[dict[str, object]] = []
    count = size = 0
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with Bar("tasks checked") as bar:
            async for orphan in orphans(store, lambda: _linked(producer, store, bar), grace=grace):
                if dry_run or await store.remove(orphan.hash, grace):
                    count, size = count + 1, size + orphan.size
                    if json:
                        found.append({"hash": orphan.hash, "size": orphan.size, "modified": orphan.modified})
                    else:
                        print_data(orphan.hash)
        drafts = 0 if dry_run else await store.remove_stale_uploads(grace)
    if json:
        print_json({"dry_run": dry_run, "store": store.shown, "count": count, "size": size, "orphans": found})
    _summarize(store, count, size, drafts, grace, dry_run=dry_run)


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


def _summarize(store: ArtifactStore, count: int, size: int, drafts: int, grace: float, *, dry_run: bool) -> None:
    done = "would delete" if dry_run else "deleted"
    rest = f", and {drafts} incomplete uploads" if drafts else ""
    note(f"{done} {count} unlinked artifacts ({size_text(size)}) in {store.shown}{rest}")
    if count and dry_run:
        note(f"all of them were saved more than {duration(grace)} ago")
