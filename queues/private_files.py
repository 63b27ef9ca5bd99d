"""Files that only their owner can read: task data, keys, configuration."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def open_private(path: Path, flags: int) -> int:
    """Open a regular file, created with mode 0600; return its descriptor.

    Raises:
        OSError: It cannot be opened, or is a symbolic link, a pipe or a device.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} must be a regular file")
    return file


@contextmanager
def replaced_file(path: Path, *, new: bool = False) -> Iterator[IO[bytes]]:
    """Open a file to write to, with mode 0600. It has its name once it is complete and on the disk.

    A symbolic link at the path is replaced, not followed. A device or a pipe there is written to as it is.

    Args:
        new: The path must be free.

    Raises:
        FileExistsError: The path is not free.
        OSError
    """
    with suppress(FileNotFoundError):
        found = path.lstat()
        if new:
            raise FileExistsError(f"{path} exists already")
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            with path.open("wb") as file:
                yield file
            return
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}-")
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(name, path)  # fails if the path is not free
        else:
            Path(name).replace(path)
        _sync_folder(path.parent)
    finally:
        Path(name).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
