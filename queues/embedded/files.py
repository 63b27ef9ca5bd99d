"""Data directory of an embedded server: the names of its files, its locks (flock) and its unix socket.

A lock belongs to the open file and not to the process: a forked child holds it as well, and the kernel releases it when
the last holder has closed the file or died.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import EmbeddedServerError
from ..private_files import open_private

with suppress(ModuleNotFoundError):  # Windows: DataDirectory.prepare refuses it with an error
    import fcntl

POLL = 0.005  # seconds between attempts; flock itself has no timeout
MAX_SOCKET_LENGTH = 107 if sys.platform == "linux" else 103  # bytes; sun_path without its closing zero
SOCKET_NAME = "redis.sock"
REPLY_TIMEOUT = 1.0  # seconds
FULL_DISK = ("No space left on device", "Disk quota exceeded")  # errors in replies and in the log of a server
LEAST_ROOM = 1 << 20  # bytes; a disk with less is full, as far as a server can use it
LOG_TAIL = 16_384  # bytes


class DataDirectory:
    """One data directory by its real path, which a change of the working directory does not affect."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.startup_lock = self.path / "startup.lock"
        self.users_lock = self.path / "users.lock"
        self.watchdog_lock = self.path / "keeper.lock"
        self.server_lock = self.path / "server.lock"
        self.pinned = self.path / "pinned"
        self.config = self.path / "redis.conf"
        self.log = self.path / "redis.log"
        self.aof = self.path / "appendonly.aof"
        self.aof_parts = self.path / "appendonlydir"

    def prepare(self) -> None:
        """Create the directory with mode 0700.

        Raises:
            EmbeddedServerError: it cannot be created or written, is a file, or belongs to another user.
        """
        if sys.modules.get("fcntl") is None:
            raise EmbeddedServerError(
                "the embedded server needs Linux or macOS: run a Redis server elsewhere and set PERDURE_REDIS_URL"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except (FileExistsError, NotADirectoryError) as error:
            raise EmbeddedServerError(f"the data directory {self.path} is a file or below a file") from error
        except OSError as error:
            raise EmbeddedServerError(
                f"could not create the data directory {self.path}: {error.strerror or error}; name another one with "
                "PERDURE_DATA_DIR"
            ) from error
        if found.st_uid != os.geteuid():
            raise EmbeddedServerError(
                f"the data directory {self.path} must belong to user {os.geteuid()}, got user {found.st_uid}: "
                "set PERDURE_DATA_DIR to another directory"
            )
        try:
            if stat.S_IMODE(found.st_mode) & 0o077:
                self.path.chmod(0o700)
            os.close(open_private(self.startup_lock, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise EmbeddedServerError(f"could not write to the data directory {self.path}: {error}") from error

    def check_links(self) -> None:
        """Raise `EmbeddedServerError` if a file that the server opens by its name is a symbolic link."""
        for path in (self.log, self.aof, self.aof_parts, *self.aof_parts.glob("*")):
            if path.is_symlink():
                raise EmbeddedServerError(f"{path} must not be a symbolic link: remove it, or move its target there")

    def exists(self) -> bool:
        """Whether a server was ever requested here."""
        return self.startup_lock.exists()

    def aof_size(self) -> int:
        """Return the bytes of the append-only files: one file up to Redis 6, a directory since 7."""
        size = 0
        for file in (self.aof, *self.aof_parts.glob("*")):
            try:
                size += file.stat().st_size
            except FileNotFoundError:  # a rewrite has replaced it
                continue
        return size


def full_disk(path: Path) -> str | None:
    """Return that the disk of a data directory is full; None if it has room, as far as is known.

    A server whose write did not fit may leave some room. Its log says so, unless the log did not fit either.
    """
    try:
        room = os.statvfs(path)
        with os.fdopen(open_private(path / "redis.log", os.O_RDONLY), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL))
            last_run = log.read().decode(errors="replace").rpartition(" is starting ")[2]
    except OSError:
        return None
    left = room.f_bavail * room.f_frsize
    if left >= LEAST_ROOM and (room.f_favail or not room.f_files) and not any(sign in last_run for sign in FULL_DISK):
        return None
    return f"the disk of {path} is full ({left:,} bytes are free)"


@contextmanager
def exclusive(path: Path, limit: float) -> Iterator[None]:
    """Hold the exclusive lock; wait for it up to `limit` seconds.

    Raises:
        EmbeddedServerError: the file cannot be opened or locked, or other processes held it all the time.
    """
    file = _open(path)
    try:
        _lock(file, fcntl.LOCK_EX, path, limit)
        yield
    finally:
        _release(file)


def shared(path: Path, limit: float) -> int:
    """Acquire the shared lock, and return the file descriptor that holds it.

    Raises:
        EmbeddedServerError: the file cannot be opened or locked, or was locked exclusively for `limit` seconds.
    """
    file = _open(path)
    try:
        _lock(file, fcntl.LOCK_SH, path, limit)
    except BaseException:
        os.close(file)
        raise
    return file


def is_free(path: Path) -> bool:
    """Whether no process holds the lock."""
    file = _open(path)
    try:
        return _try(file, fcntl.LOCK_EX, path)
    finally:
        _release(file)


def holders(path: Path) -> frozenset[int] | None:
    """Return the ids of the processes that hold the lock; None if the system does not report them (macOS)."""
    if is_free(path):
        return frozenset()
    found = path.stat()
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  READ 4711 fe:00:1234 0 EOF"; a waiting process has "->" in the second field
    fields = [line.split() for line in lines]
    return frozenset(int(f[4]) for f in fields if f[1] == "FLOCK" and f[5] == name) or None


def _open(path: Path) -> int:
    try:
        return open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise EmbeddedServerError(f"could not open {path}: {error}") from error


def _release(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # after a mere close, a child forked meanwhile would still hold the lock
    os.close(file)


def _lock(file: int, kind: int, path: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not _try(file, kind, path):
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"could not lock {path} within {limit:.0f} seconds: another process starts or stops the server"
            )
        time.sleep(POLL)


def _try(file: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        raise EmbeddedServerError(f"could not lock {path}: {error}; put the data directory on a local disk") from error
    return True


def socket_path(directory: DataDirectory) -> Path:
    """Return the socket's path: in the data directory, or in a short temporary one if that path is too long."""
    near = directory.path / SOCKET_NAME
    if len(os.fsencode(near)) <= MAX_SOCKET_LENGTH:
        return near
    digest = hashlib.sha256(os.fsencode(directory.path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"perdure-{os.geteuid()}-{digest}" / SOCKET_NAME


def place_socket(directory: DataDirectory) -> Path:
    """Create the directory of a new server's socket, and return the path. The server replaces a stale socket.

    Raises:
        EmbeddedServerError: the short temporary directory belongs to another user, or is also too long.
    """
    path = socket_path(directory)
    if len(os.fsencode(path)) > MAX_SOCKET_LENGTH:
        raise EmbeddedServerError(
            f"{path} is too long for a socket ({MAX_SOCKET_LENGTH} bytes at most): "
            "choose a shorter data directory, or a shorter TMPDIR"
        )
    if path.parent == directory.path:
        return path
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()  # not stat: a link may belong to another user
    except OSError as error:
        raise EmbeddedServerError(f"could not create the directory of {path}: {error}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EmbeddedServerError(
            f"{path.parent} must be a directory of user {os.geteuid()} with mode 0700: "
            "remove it, or choose a shorter data directory"
        )
    return path


def ask(path: Path, command: str) -> str | None:
    """Return the reply to an inline command, an error reply with its leading minus, or None without a reply."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REPLY_TIMEOUT)
            connection.connect(os.fspath(path))
            connection.sendall(command.encode() + b"\r\n")
            with connection.makefile("rb") as stream:
                head = stream.readline().rstrip().decode(errors="replace")
                if head.startswith("$"):
                    return stream.read(int(head[1:])).decode(errors="replace")
    except OSError:
        return None
    return head or None


def is_ready(path: Path) -> bool:
    """Whether the server at `path` has loaded its data and accepts commands."""
    reply = ask(path, "PING")
    return reply is not None and not reply.startswith("-LOADING")
