"""Folders of running tasks.

A process has one folder and holds its lock; each run has a folder in it. The kernel releases the lock when the process
dies, and the next process that needs a folder in the same place removes what the dead one left. A folder whose files
are not saved has a mark beside it: it stays until the next run of its task takes it over, or for 30 days.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..durable.step_files import FOLDER_PREFIX, folder_name
from ..errors import WorkspaceError
from .manifest import FOLDER_MODE, Manifest

with suppress(ModuleNotFoundError):  # Windows, where producers run, and no workers
    import fcntl

_LOCK: Final = ".lock"

_UNSAVED: Final = ".unsaved"
"""End of the name of a mark: that of its folder comes first."""

_KEPT_SECONDS: Final = 30 * 86_400
"""Time for which a folder with a mark is kept, from its mark on."""

_RUN_FOLDER: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{0,60}-[a-z0-9_]{8}")

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
        return Path(tempfile.mkdtemp(prefix=f"{folder_name(task_id)}-", dir=_own_folder(place)))
    except OSError as error:
        raise WorkspaceError(
            f"could not create a workspace in {str(place)!r}: {error}; set PERDURE_WORKSPACES to another folder"
        ) from error


def lay_out_folder(folder: Path, manifest: Manifest) -> None:
    """Create the folders of a manifest in an empty one, so that files can be written. It blocks.

    Raises `WorkspaceError`.
    """
    try:
        for path in manifest.all_folders():
            (folder / path).mkdir(exist_ok=True)  # there if the store was away, and the restore starts over
            (folder / path).chmod(FOLDER_MODE)
    except OSError as error:
        raise WorkspaceError(f"could not restore a folder of {str(folder)!r}: {error}") from error


def finish_folder(folder: Path, manifest: Manifest) -> None:
    """Create the links of a manifest, and set the modes of its folders, after the files were written. It blocks.

    Nothing is written after this, so no link leads a write out of the folder.

    Raises `WorkspaceError`.
    """
    try:
        for path, link in manifest.links.items():
            target = os.path.join(folder, link.target).rstrip("/") if link.inside else link.target  # noqa: PTH118 - a text
            (folder / path).symlink_to(target)
        for path, mode in reversed(manifest.all_folders().items()):
            if mode != FOLDER_MODE:
                (folder / path).chmod(mode)
    except OSError as error:
        raise WorkspaceError(f"could not restore a link or a folder of {str(folder)!r}: {error}") from error


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run, and its mark. What cannot be removed stays until the process has ended."""
    _remove(folder)
    keep_folder(folder, keep=False)


def keep_folder(folder: Path, *, keep: bool) -> None:
    """Set or remove the mark of a folder whose files are not saved. A full disk leaves it without one."""
    mark = folder.with_name(f"{folder.name}{_UNSAVED}")
    with suppress(OSError):
        if keep:
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)


def check_folder_name(name: str) -> None:
    """Raise `WorkspaceError` for a name that no folder of a run has."""
    if _RUN_FOLDER.fullmatch(name) is None:
        raise WorkspaceError(f"could not take over a workspace: {name[:100]!r} is not the name of its folder")


def take_folder(place: Path, name: str) -> Path | None:
    """Move the folder that another run has left, also of another process, to this process; None if it is missing.

    It keeps its name and its mark, so that it is found again if this process dies. It blocks.

    Raises `WorkspaceError`, also for a name that no folder of a run has, which may lead elsewhere.
    """
    check_folder_name(name)
    try:
        folder = _own_folder(place) / name
        former = next(filter(_is_own, place.glob(f"{FOLDER_PREFIX}*/{glob.escape(name)}")), None)
        if former is None:
            return None
        keep_folder(folder, keep=True)
        if former != folder:
            former.rename(folder)
            keep_folder(former, keep=False)
    except OSError as error:
        raise WorkspaceError(f"could not take over workspace {name!r} in {str(place)!r}: {error}") from error
    return folder


def _remove(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as possible: also folders that their owner may not write to."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        return
    with suppress(OSError):
        for path, _, _ in os.walk(folder):  # which follows no links
            Path(path).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Return whether a path is a folder of this user: other users can write into a folder for temporary files."""
    try:
        found, outer = folder.lstat(), folder.parent.lstat()
    except OSError:
        return False
    return all(stat.S_ISDIR(each.st_mode) and each.st_uid == os.getuid() for each in (found, outer))


def _own_folder(place: Path) -> Path:
    key = (place, os.getpid())
    while key not in _processes:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(place)
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process had the lock first, and took the folder for an abandoned one
            _processes[key] = (folder, lock)
        else:
            os.close(lock)
    return _processes[key][0]


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of dead processes. One without a lock file is being created."""
    for folder in place.glob(f"{FOLDER_PREFIX}*"):
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode) or not stat.S_ISREG((folder / _LOCK).lstat().st_mode):
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # alive
        else:
            _remove_unmarked(folder)
        finally:
            os.close(lock)


def _remove_unmarked(folder: Path) -> None:
    """Remove the folder of a dead process, but for the folders with a recent mark."""
    kept = set[str]()
    for mark in folder.glob(f"*{_UNSAVED}"):
        with suppress(OSError):
            if time.time() - mark.stat().st_mtime < _KEPT_SECONDS:
                kept |= {mark.name, mark.name.removesuffix(_UNSAVED)}
    if not any((folder / name).is_dir() for name in kept):
        _remove(folder)
        return
    for path in folder.iterdir():
        if path.name not in kept and path.name != _LOCK:
            _remove(path)
