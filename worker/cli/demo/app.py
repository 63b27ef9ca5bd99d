"""Application of the demo: one task reports on the files of a folder, another one publishes the report."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ....deadletter import Retry
from ...app import App
from ...durable import Context
from ...journal import Artifact
from .journal import log_step_run

__all__ = ["ATTEMPTS", "MAX_KILLS", "STEP_PAUSE", "app", "count_file", "list_files", "publish", "render", "report"]

MAX_KILLS: Final = 20
ATTEMPTS: Final = 3
STEP_PAUSE: Final = 0.03
"""Seconds that a step waits for each file, as for a call to a model. They leave time for the kills."""
_MAX_FILE_SIZE: Final = 16 << 20
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages"})

app = App("demo")


@app.task(queue=app.name, retry=Retry(max_attempts=1, max_crashes=MAX_KILLS))
async def report(ctx: Context, root: str, limit: int) -> Artifact:
    """Report on the files of a folder, with one step per file."""
    files = await ctx.step("list", _list, root, limit)
    rows = [await ctx.step("count", _count, root, path) for path in files]

    async def save() -> Artifact:
        log_step_run()
        return await ctx.artifacts.save("report.txt", render(root, rows))

    return await ctx.step("save", save)


def _list(root: str, limit: int) -> list[str]:
    log_step_run()
    return list_files(root, limit)


def _count(root: str, path: str) -> str:
    log_step_run(path)
    time.sleep(STEP_PAUSE)
    return count_file(root, path)


@app.task(queue=app.name, retry=Retry(max_attempts=ATTEMPTS, base=0.25))
async def publish(ctx: Context, text: Artifact, site: str) -> None:
    """Copy a report to a folder, beside its checksum. Fails while the folder does not exist."""
    path = str(await ctx.artifacts.path(text))
    checksum = await ctx.step("checksum", _checksum, path)
    await ctx.step("publish", _publish, path, site, checksum)


def _checksum(path: str) -> str:
    log_step_run()
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _publish(path: str, site: str, checksum: str) -> None:
    log_step_run()
    Path(site, "report.sha256").write_text(f"{checksum}  report.txt\n", encoding="utf-8")
    Path(site, "report.txt").write_bytes(Path(path).read_bytes())


def list_files(root: str, limit: int) -> list[str]:
    """Return at most `limit` files below a folder, evenly spread: sorted POSIX paths relative to it.

    Leaves out hidden folders, `__pycache__`, `site-packages`, linked folders, unreadable files, files over 16 MiB, and
    names that are not printable or not UTF-8.
    """
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in _SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in names)
        readable = [path for path in paths if os.access(path, os.R_OK) and path.is_file()]
        found += [path.relative_to(root).as_posix() for path in readable if path.stat().st_size <= _MAX_FILE_SIZE]
    found = sorted(path for path in found if path.isprintable())
    taken = min(limit, len(found))
    return [found[index * len(found) // taken] for index in range(taken)]


def count_file(root: str, path: str) -> str:
    """Return the report's row for one file."""
    data = Path(root, path).read_bytes()
    digest, lines = hashlib.sha256(data).hexdigest(), data.count(b"\n")
    return f"{digest}  {lines:>9,}  {len(data.split()):>9,}  {len(data):>10,}  {path}"


def render(root: str, rows: Sequence[str]) -> str:
    """Return the text of the report. Equal rows give equal text."""
    head = f"{'SHA-256':<64}  {'lines':>9}  {'words':>9}  {'bytes':>10}  path"
    return "\n".join((f"{len(rows):,} files of {root!r}", head, *rows, ""))
