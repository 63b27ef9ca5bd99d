"""Folders of running tasks.

A process has one folder and holds its lock; each run has a folder in it. The kernel releases the lock when the process
dies, and the next process that needs a folder in the same place removes what the dead one left.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..errors import WorkspaceError

with suppress(ModuleNotFoundError):  # Windows, where producers run, and no workers
    import fcntl

__all__ = ["make_folder", "remove_folder"]

_PREFIX: Final = "perdure-workspaces-"

_LOCK: Final = ".lock"

_processes: dict[tuple[Path, int], tuple[Path, int]] = {}
"""Folder and lock of this process by place; a forked child has a folder of its own."""


def make_folder(place: Path, task_id: str) -> Path:
    """Return a new, empty folder for a run. It blocks.

    Args:
        place: Folder in which all processes have theirs.
        task_id: A part of the folder's name, for people.

    Raises `WorkspaceError`.
    """
    try:
        folder = _own_folder(place)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", task_id)[:60].lstrip(".")
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    except OSError as error:
        raise WorkspaceError(
            f"could not create a workspace in {str(place)!r}: {error}; set PERDURE_WORKSPACES to another folder"
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run. What cannot be removed stays until the process has ended."""
    shutil.rmtree(folder, ignore_errors=True)


def _own_folder(place: Path) -> Path:
    key = (place, os.getpid())
    while key not in _processes:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process had the lock first, and took the folder for an abandoned one
            _processes[key] = (folder, lock)
        else:
            os.close(lock)
    return _processes[key][0]


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of dead processes. One without a lock file is being created."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # alive
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
