"""`perdure artifacts`: what the tasks of a deployment have saved, and what nothing links any more.

`perdure task artifact`: what a task has saved, listed, and fetched from the store.
"""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final

import anyio
import anyio.to_thread
import typer

from ...queues import Producer
from ..artifacts import ArtifactLink, ArtifactStore, all_links, orphans, task_links
from ..durable import artifact_store
from ..settings import load_settings
from .support.connection import ConnectionOptions, find_handle, with_connection_options
from .support.errors import Failed, Misuse
from .support.options import TaskId, in_duration
from .support.output import AsJson, Bar, duration, note, print_data, print_json, print_json_lines, print_table

__all__ = ["app", "artifact", "describe_link", "size_text"]

_UNITS: Final = (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000))

STDOUT: Final = "-"


@with_connection_options
def artifact(
    place: ConnectionOptions,
    task_id: TaskId,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The artifact. Else all are listed.", show_default=False)
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to put it; - for stdout. Else a file of its own name, here."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List what a task has saved, or fetch one of them.

    What is fetched is checked against its hash first: a file is replaced
    by all of the right bytes or not at all, and nothing else is printed.

    Example: perdure task artifact 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f report.md -o -
    """
    if name is None and output is not None:
        raise Misuse("--output is for one artifact: name it, as 'perdure task artifact ID' lists them")
    if name is not None and json:
        raise Misuse("--json is for the list: an artifact is printed as it is, with --output -")
    anyio.run(_run, place, task_id, name, output, json)


async def _run(place: ConnectionOptions, task_id: str, name: str | None, output: str | None, json: bool) -> None:
    async with place.producer() as producer:
        handle = await find_handle(producer, task_id)
        links = await task_links(producer.gateway, handle.partition, task_id)
        if name is None:
            _list_of_task(task_id, links, json=json)
            return
        link = next((link for link in links if link.name == name), None)
        if link is None:
            names = ", ".join(repr(link.name) for link in links) or "none"
            raise Failed(f"task {task_id} has saved no artifact {name!r}; it has: {names}")
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        what = f"artifact {name!r} of task {task_id}"
        if output == STDOUT:
            await _print(store, what, link)
            return
        to = _target(link.name, output)
        await store.fetch(what, link.hash, link.size, to)
    print_data(str(to))
    note(f"{what}: {size_text(link.size)}, SHA-256 {link.hash}")


def _list_of_task(task_id: str, links: list[ArtifactLink], *, json: bool) -> None:
    if json:
        print_json([describe_link(link) for link in links])
    elif links:
        print_table(
            ("name", "size#", "media type", "sha-256"),
            [(link.name, size_text(link.size), link.media_type, link.hash) for link in links],
        )
    else:
        note(f"task {task_id} has saved no artifacts")


def _target(name: str, output: str | None) -> Path:
    """Where to put it. What somebody has in a file is not replaced unless they name it."""
    if output is None:
        target = Path(name)
        if target.exists():
            raise Failed(f"there is a file {name!r} here already: name it with --output to replace it")
        return target
    target = Path(output)
    if target.is_dir():
        raise Misuse(f"{output!r} is a folder: name a file in it, such as {str(target / name)!r}")
    return target


async def _print(store: ArtifactStore, what: str, link: ArtifactLink) -> None:
    """Through a temporary file: the bytes are known to be right before the first one is printed."""
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        file = Path(folder) / "fetched"
        await store.fetch(what, link.hash, link.size, file)
        await anyio.to_thread.run_sync(_copy_to_stdout, file)


def _copy_to_stdout(file: Path) -> None:
    sys.stdout.flush()
    try:
        with file.open("rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:  # whoever reads has read enough
            raise Failed(f"stdout cannot be written: {error}") from error


def describe_link(link: ArtifactLink) -> dict[str, object]:
    """A link as plain data, for programs."""
    return {"name": link.name, "size": link.size, "media_type": link.media_type, "hash": link.hash}


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    for unit, length in _UNITS:
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def artifacts() -> None:
    """See what tasks have saved, and collect what nothing links."""


@app.command("list")
@with_connection_options
def list_(
    place: ConnectionOptions,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="No more than so many.")] = 1000,
    json: AsJson = False,
) -> None:
    """List the artifacts of all tasks that are kept, in no particular order. With --json: one object per line.

    Example: perdure artifacts list
    """
    anyio.run(_list, place, limit, json)


async def _list(place: ConnectionOptions, limit: int, json: bool) -> None:
    rows: list[tuple[str, str, str, str, str]] = []
    seen: set[tuple[str, str]] = set()
    async with place.producer() as producer:
        async for partition, task_id, links in all_links(producer.gateway, producer.namespace):
            for link in links:
                if (task_id, link.name) in seen:  # SCAN may find a task twice
                    continue
                if len(seen) == limit:
                    break
                seen.add((task_id, link.name))
                if json:
                    print_json_lines([{"task": task_id, "queue": partition.queue, **describe_link(link)}])
                else:
                    rows.append((task_id, link.name, size_text(link.size), link.media_type, link.hash))
            if len(seen) == limit:
                break
        if rows:
            print_table(("task", "name", "size#", "media type", "sha-256"), rows)
        elif not seen:
            note(f"no artifacts of tasks of namespace {producer.namespace.name!r} on {producer.address.shown}")
    if len(seen) == limit:
        note(f"there may be more than {limit}: raise --limit to see them")


@app.command()
@with_connection_options
def gc(
    place: ConnectionOptions,
    *,
    grace: Annotated[
        float,
        in_duration("Only what was saved, or saved again, longer ago than that: 24h, 30min, 7d, or seconds.", "24h"),
    ] = 86_400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    json: AsJson = False,
) -> None:
    """Delete artifacts that no task links, and print their hashes.

    A run that dies between saving and linking leaves such, and so does a
    task whose record has expired. Tasks and workers may go on meanwhile:
    what they have saved within the grace stays.

    Example: perdure artifacts gc --dry-run
    """
    anyio.run(_collect, place, grace, dry_run, json)


async def _collect(place: ConnectionOptions, grace: float, dry_run: bool, json: bool) -> None:
    found: list[dict[str, object]] = []
    count = size = 0
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with Bar("tasks looked at") as bar:
            async for orphan in orphans(store, lambda: _linked(producer, bar), grace=grace):
                if dry_run or await store.remove(orphan.hash, grace):
                    count, size = count + 1, size + orphan.size
                    if json:
                        found.append({"hash": orphan.hash, "size": orphan.size, "modified": orphan.modified})
                    else:
                        print_data(orphan.hash)
        drafts = 0 if dry_run else await store.remove_stale_uploads(grace)
    if json:
        print_json({"dry_run": dry_run, "store": store.shown, "count": count, "size": size, "orphans": found})
    _say(store, count, size, drafts, grace, dry_run=dry_run)


async def _linked(producer: Producer, bar: Bar) -> AsyncIterator[str]:
    async for _, _, links in all_links(producer.gateway, producer.namespace):
        bar.advance()
        for link in links:
            yield link.hash


def _say(store: ArtifactStore, count: int, size: int, drafts: int, grace: float, *, dry_run: bool) -> None:
    done = "would be deleted" if dry_run else "deleted"
    rest = f", and {drafts} that were never completed" if drafts else ""
    note(f"{count} artifacts ({size_text(size)}) that no task links {done} in {store.shown}{rest}")
    if count and dry_run:
        note(f"all of them were saved more than {duration(grace)} ago")
