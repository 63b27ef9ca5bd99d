"""Folders of running tasks.

Tools write the path of a folder into files: into the scripts of a virtual environment, into the cache of a build. So
each run of a task, and each turn of a session, has the same path on hosts with the same `PERDURE_WORKSPACES`: one
folder of the user has the folders of all tasks, each with a lock. If that cannot be used, because another run has it,
or a program that a killed one has left works in it, the run has a folder in that of its process.

The kernel releases the locks of a process that dies, and the next process that needs a folder in the same place removes
what the dead one left. A folder whose files are not saved has a mark beside it: it stays until the next run of its task
takes it over, or for 30 days.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
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

_locks: dict[Path, int] = {}
"""Locks of the folders of tasks that this process has."""

_cleaned: set[tuple[Path, int]] = set()
"""Places in which this process has looked for what dead ones left."""

_processes: dict[tuple[Path, int], tuple[Path, int]] = {}
"""Folder and lock of this process by place; a forked child has a folder of its own."""


def make_folder(place: Path, task_id: str) -> Path:
    """Return a new, empty folder for a run, if possible where the runs of the task before it had theirs. It blocks.

    Args:
        place: Folder in which all processes have theirs.
        task_id: A part of the folder's name.

    Raises `WorkspaceError`.
    """
    try:
        _clean(place)
        if (folder := _make_stable(place, task_id)) is not None:
            return folder
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
    release_folder(folder)


def release_folder(folder: Path) -> None:
    """Let another run have a folder of this process."""
    if (lock := _locks.pop(folder, None)) is not None:
        _unlock(folder, lock)


def keep_folder(folder: Path, *, keep: bool) -> None:
    """Set or remove the mark of a folder whose files are not saved. A full disk leaves it without one."""
    mark = _mark_of(folder)
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
        former = next(filter(_is_own, _named(place, name)), None)
        if former is None:
            return None
        if former in _locks or (former.parent == _shared_folder(place) and _hold(former)):
            folder = former
        else:
            folder = _own_folder(place) / name
        keep_folder(folder, keep=True)
        if former != folder:
            former.rename(folder)
            keep_folder(former, keep=False)
    except OSError as error:
        raise WorkspaceError(f"could not take over workspace {name!r} in {str(place)!r}: {error}") from error
    return folder


def _named(place: Path, name: str) -> Iterator[Path]:
    """Yield the folders of runs with a name, which may be links of other users."""
    return place.glob(f"{FOLDER_PREFIX}*/{glob.escape(name)}")


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


def _shared_folder(place: Path) -> Path:
    return place / f"{FOLDER_PREFIX}{os.getuid()}"


def _make_stable(place: Path, task_id: str) -> Path | None:
    """Return the folder that each run of a task has, empty; None if it cannot be used now."""
    shared = _shared_folder(place)
    with suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    found = shared.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return None  # another user made it, and could replace what is in it
    name = folder_name(task_id)
    folder = shared / f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    if any(other != folder for other in _named(place, folder.name)):
        return None  # one with unsaved files, which was moved: a name leads to one folder
    if not _hold(folder):
        return None
    try:
        if os.path.lexists(folder):
            if _mark_of(folder).exists() or _is_worked_in(folder, _working_folders()):
                release_folder(folder)
                return None
            _remove(folder)
        folder.mkdir(mode=0o700)
    except BaseException:
        release_folder(folder)
        raise
    return folder


def _hold(folder: Path) -> bool:
    """Take the lock of a folder, unless another run has it. Return whether this process has it now."""
    if folder in _locks:  # of another run in this process
        return False
    lock = _lock(folder)
    if lock is not None:
        _locks[folder] = lock
    return lock is not None


def _lock(folder: Path) -> int | None:
    path = _lock_of(folder)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.lstat().st_ino == os.fstat(lock).st_ino:
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:  # its holder has just removed it
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _unlock(folder: Path, lock: int) -> None:
    """Remove a lock while it is held, so that who has opened it meanwhile sees that it is another file."""
    with suppress(OSError):
        _lock_of(folder).unlink(missing_ok=True)
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child that was forked has it open, too
    os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")


def _mark_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_UNSAVED}")


def _is_worked_in(folder: Path, working: Collection[str]) -> bool:
    """Return whether a program works in a folder: one that a dead process has started, and that writes on."""
    inside = f"{folder.resolve()}/"
    return any(f"{path}/".startswith(inside) for path in working)


def _working_folders() -> set[str]:
    """Return the folders in which programs of this user work. Only Linux tells."""
    found = set[str]()
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found.add(os.readlink(cwd))  # noqa: PTH115 - many paths
    return found


def _clean(place: Path) -> None:
    """Remove what dead processes have left, once in each process."""
    key = (place, os.getpid())
    if key in _cleaned:
        return
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(place)
    if _is_own(shared := _shared_folder(place)):
        working = _working_folders()
        for folder in {path.with_name(path.name.removesuffix(_LOCK)) for path in shared.iterdir()}:
            if _RUN_FOLDER.fullmatch(folder.name) is None or folder in _locks:
                continue
            if (lock := _lock(folder)) is None:
                continue  # of a run
            if not _is_kept(_mark_of(folder)) and not _is_worked_in(folder, working):
                _remove(folder)
                keep_folder(folder, keep=False)
            _unlock(folder, lock)
    _cleaned.add(key)


def _own_folder(place: Path) -> Path:
    key = (place, os.getpid())
    while key not in _processes:
        _clean(place)
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


def _is_kept(mark: Path) -> bool:
    """Return whether there is a mark, and it is recent."""
    try:
        return time.time() - mark.stat().st_mtime < _KEPT_SECONDS
    except OSError:
        return False


def _remove_unmarked(folder: Path) -> None:
    """Remove the folder of a dead process, but for the folders with a recent mark."""
    kept = set[str]()
    for mark in folder.glob(f"*{_UNSAVED}"):
        if _is_kept(mark):
            kept |= {mark.name, mark.name.removesuffix(_UNSAVED)}
    if not any((folder / name).is_dir() for name in kept):
        _remove(folder)
        return
    for path in folder.iterdir():
        if path.name not in kept and path.name != _LOCK:
            _remove(path)
