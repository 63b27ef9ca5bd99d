"""`perdure task artifact`: what a task has saved, listed, and fetched from the store."""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import anyio
import anyio.to_thread
import typer

from ..artifacts import ArtifactStore, Link, task_links
from ..durable import artifact_store
from ..settings import load_settings
from .connection import Place, placed
from .failures import Failed, Misuse
from .lookup import find_handle
from .output import AsJson, print_data, print_json, print_table, tell
from .parameters import TaskId

__all__ = ["artifact", "describe_link", "size_text"]

_UNITS: Final = (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000))

STDOUT: Final = "-"


@placed
def artifact(
    place: Place,
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


async def _run(place: Place, task_id: str, name: str | None, output: str | None, json: bool) -> None:
    async with place.producer() as producer:
        handle = await find_handle(producer, task_id)
        links = await task_links(producer.gateway, handle.partition, task_id)
        if name is None:
            _list(task_id, links, json=json)
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
    tell(f"{what}: {size_text(link.size)}, SHA-256 {link.hash}")


def _list(task_id: str, links: list[Link], *, json: bool) -> None:
    if json:
        print_json([describe_link(link) for link in links])
    elif links:
        print_table(
            ("name", "size#", "media type", "sha-256"),
            [(link.name, size_text(link.size), link.media_type, link.hash) for link in links],
        )
    else:
        tell(f"task {task_id} has saved no artifacts")


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


async def _print(store: ArtifactStore, what: str, link: Link) -> None:
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


def describe_link(link: Link) -> dict[str, object]:
    """A link as plain data, for programs."""
    return {"name": link.name, "size": link.size, "media_type": link.media_type, "hash": link.hash}


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    for unit, length in _UNITS:
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"
