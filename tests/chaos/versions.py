"""The package of another commit, for workers that share a queue during a rolling deploy."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZipFile

__all__ = [
    "ROOT",
    "NoHistory",
    "former_commit",
    "knows_budgets",
    "knows_children",
    "knows_limits",
    "knows_schedules",
    "knows_streams",
    "knows_supervisors",
    "unpack",
]

ROOT: Final = Path(__file__).parents[2]
"""The checkout, which is the package."""

_PACKAGE: Final = (":(glob)*.py", "queues", "deadletter", "worker")


class NoHistory(Exception):
    """The commit is not in this checkout, or this is not a checkout."""


def former_commit() -> str:
    """Return the latest tag before HEAD, else the newest earlier commit with another package.

    Raises `NoHistory`.
    """
    with suppress(NoHistory):  # else nothing was released yet
        return _git("describe", "--tags", "--abbrev=0", "HEAD^").decode().strip()
    found = _git("log", "-n", "2", "--format=%H", "--", *_PACKAGE).decode().split()
    changed = _git("status", "--porcelain", "--", *_PACKAGE).strip()
    if changed and found:
        return found[0]
    if len(found) < 2:
        raise NoHistory("this checkout has no earlier commit")
    return found[1]


def unpack(commit: str, folder: Path) -> Path:
    """Write the package of a commit into `folder`; return the entry for PYTHONPATH. Raises `NoHistory`."""
    package = folder / "perdure"
    package.mkdir(parents=True)
    with ZipFile(BytesIO(_git("archive", "--format=zip", commit, *_PACKAGE))) as archive:
        archive.extractall(package)
    return folder


def knows_supervisors(folder: Path) -> bool:
    """Return whether the version unpacked there has `worker run --processes`."""
    return (folder / "perdure" / "worker" / "supervise").is_dir()


def knows_children(folder: Path) -> bool:
    """Return whether the version unpacked there has `ctx.spawn` and the waits that came with it."""
    return (folder / "perdure" / "worker" / "durable" / "joining.py").is_file()


def knows_streams(folder: Path) -> bool:
    """Return whether the version unpacked there has `ctx.emit`."""
    return (folder / "perdure" / "worker" / "durable" / "emitting.py").is_file()


def knows_limits(folder: Path) -> bool:
    """Return whether the version unpacked there has `app.limit`."""
    return (folder / "perdure" / "queues" / "limits").is_dir()


def knows_schedules(folder: Path) -> bool:
    """Return whether the version unpacked there has `app.schedule`."""
    return (folder / "perdure" / "queues" / "schedules").is_dir()


def knows_budgets(folder: Path) -> bool:
    """Return whether the version unpacked there has budgets of tasks."""
    return (folder / "perdure" / "worker" / "durable" / "spending.py").is_file()


def _git(*command: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", ROOT, *command], check=False, capture_output=True)
    except OSError as error:
        raise NoHistory(f"git cannot be run: {error}") from None
    if done.returncode:
        raise NoHistory(done.stderr.decode().strip())
    return done.stdout
