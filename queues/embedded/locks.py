"""File locks (flock) with a bounded wait.

A lock belongs to the open file, not to the process: a forked child holds it too, and the kernel lets
it go when the last holder has closed the file or died.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import EmbeddedServerError

if sys.platform != "win32":  # Windows is refused, in words, when a data directory is prepared
    import fcntl

__all__ = ["exclusive", "holders", "is_free", "shared"]

POLL = 0.005  # seconds; flock itself can only wait forever


@contextmanager
def exclusive(path: Path, limit: float) -> Iterator[None]:
    """Hold the lock alone, waiting up to `limit` seconds for it.

    Raises:
        EmbeddedServerError: the file cannot be opened or locked, or others held it all the time.
    """
    file = _open(path)
    try:
        _take(file, fcntl.LOCK_EX, path, limit)
        yield
    finally:
        _release(file)


def shared(path: Path, limit: float) -> int:
    """Hold the lock together with others: the file descriptor to close when done.

    Raises:
        EmbeddedServerError: the file cannot be opened or locked, or one held it alone for `limit` seconds.
    """
    file = _open(path)
    try:
        _take(file, fcntl.LOCK_SH, path, limit)
    except BaseException:
        os.close(file)
        raise
    return file


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock, alone or together with others."""
    file = _open(path)
    try:
        return _try(file, fcntl.LOCK_EX, path)
    finally:
        _release(file)


def holders(path: Path) -> frozenset[int] | None:
    """The ids of the processes holding the lock; None where the system does not tell (Linux does)."""
    if is_free(path):
        return frozenset()
    found = path.stat()
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  READ 4711 fe:00:1234 0 EOF"; one who waits has "->" in second place
    fields = [line.split() for line in lines]
    return frozenset(int(f[4]) for f in fields if f[1] == "FLOCK" and f[5] == name) or None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EmbeddedServerError(f"{path} cannot be opened: {error}") from error


def _release(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave the lock to a child forked meanwhile
    os.close(file)


def _take(file: int, kind: int, path: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not _try(file, kind, path):
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"{path} was held by another process for {limit:.0f} seconds: it may hang in starting "
                "or stopping the server"
            )
        time.sleep(POLL)


def _try(file: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        raise EmbeddedServerError(
            f"{path} cannot be locked: {error}; put the data directory on a local disk"
        ) from error
    return True
