"""Artifact backend in a local folder, or in one that several hosts have mounted."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...queues.regular_files import NotRegular, open_below
from ...queues.transport.value_store import is_sha256
from .backend import INCOMING, StoredObject, Upload, WrongSize, path_of

with suppress(ModuleNotFoundError):  # Windows, where producers run, and no workers
    import fcntl


class LocalBackend:
    """Backend in a file system.

    Bytes are on disk before the object gets its name, and the name is on disk before `keep` returns, so linked
    artifacts survive a power loss. Saving and collecting exclude each other by a file lock (`flock`), which the kernel
    releases when its holder dies: either the collector sees that an object was saved again, or the saver sees that it
    is gone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def shown(self) -> str:
        return str(self._root)

    def upload(self) -> Upload:
        incoming = self._root / INCOMING
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        incoming.mkdir(mode=0o700, exist_ok=True)
        return _LocalUpload(self, incoming)

    def open(self, digest: str, size: int) -> IO[bytes]:
        try:
            file = open_below(self._root, path_of(digest))
        except NotADirectoryError:
            if self._root.is_dir():
                raise NotRegular(path_of(digest), "below a link or a file") from None
            raise
        if os.fstat(file.fileno()).st_size != size:
            file.close()
            raise WrongSize
        return file

    def path(self, digest: str) -> Path:
        return self._root / path_of(digest)

    def objects(self) -> Iterator[StoredObject]:
        for first in sorted(_listed(self._root)):
            for rest in sorted(_listed(self._root / first)) if len(first) == 2 else ():
                if is_sha256(first + rest):
                    with suppress(FileNotFoundError):  # the collector removed it
                        found = (self._root / first / rest).lstat()
                        if stat.S_ISREG(found.st_mode):
                            yield StoredObject(first + rest, found.st_size, found.st_mtime)

    def remove(self, digest: str, before: float) -> bool:
        path = self.path(digest)
        with self.lock(fcntl.LOCK_EX):
            if path.lstat().st_mtime >= before:
                return False
            path.unlink()
        return True

    def remove_stale_uploads(self, before: float) -> int:
        removed = 0
        for name in _listed(self._root / INCOMING):
            path = self._root / INCOMING / name
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed

    @contextmanager
    def lock(self, kind: int) -> Iterator[None]:
        """Hold the lock for a moment: shared while an object is saved, exclusive while one is deleted."""
        file = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, kind)
            yield
        finally:
            os.close(file)


class _LocalUpload:
    def __init__(self, folder: LocalBackend, incoming: Path) -> None:
        self._folder = folder
        number, name = tempfile.mkstemp(dir=incoming)
        self._path = Path(name)
        self._file = os.fdopen(number, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def keep(self, digest: str, size: int) -> None:
        os.fchmod(self._file.fileno(), 0o400)  # an object is never changed
        os.fsync(self._file.fileno())
        path = self._folder.path(digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._folder.lock(fcntl.LOCK_SH):
            try:
                os.utime(path, follow_symlinks=False)
            except FileNotFoundError:
                self._path.rename(path)
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise WrongSize
        _sync(path.parent)
        _sync(path.parent.parent)

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _listed(folder: Path) -> list[str]:
    try:
        return [found.name for found in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync(folder: Path) -> None:
    """Sync a folder, so that its names are on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
