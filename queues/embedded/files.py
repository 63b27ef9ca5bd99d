"""The data directory of an embedded server: its checks, and the names of its files.

File locks (flock) with a bounded wait.

A lock belongs to the open file, not to the process: a forked child holds it too, and the kernel lets
it go when the last holder has closed the file or died.

Where the server's unix socket is, and one question and answer over it.
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
from contextlib import contextmanager
from pathlib import Path

from ..errors import EmbeddedServerError

__all__ = [
    "DataDirectory",
    "ask",
    "exclusive",
    "holders",
    "is_free",
    "is_ready",
    "place_socket",
    "shared",
    "socket_path",
]


class DataDirectory:
    """One data directory, named by its real path, whatever the working directory becomes later."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.startup_lock = self.path / "startup.lock"
        self.users_lock = self.path / "users.lock"
        self.keeper_lock = self.path / "keeper.lock"
        self.server_lock = self.path / "server.lock"
        self.pinned = self.path / "pinned"
        self.config = self.path / "redis.conf"
        self.log = self.path / "redis.log"
        self.aof = self.path / "appendonly.aof"
        self.aof_parts = self.path / "appendonlydir"

    def prepare(self) -> None:
        """Make the directory, for this user alone (mode 0700).

        Raises:
            EmbeddedServerError: it cannot be made or written, is a file, or belongs to another user.
        """
        if os.name != "posix":
            raise EmbeddedServerError(
                "the embedded server needs Linux or macOS: on this system run a Redis server "
                "elsewhere and give its address in PERDURE_REDIS_URL"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except (FileExistsError, NotADirectoryError) as error:
            raise EmbeddedServerError(f"the data directory {self.path} is, or lies below, a file") from error
        except OSError as error:
            raise EmbeddedServerError(f"the data directory {self.path} cannot be made: {error}") from error
        if found.st_uid != os.geteuid():
            raise EmbeddedServerError(
                f"the data directory {self.path} belongs to user {found.st_uid}, not to user {os.geteuid()} "
                "who runs this: name a directory of your own in PERDURE_DATA_DIR"
            )
        try:
            if stat.S_IMODE(found.st_mode) & 0o077:
                self.path.chmod(0o700)
            self.startup_lock.touch(mode=0o600)
        except OSError as error:
            raise EmbeddedServerError(f"the data directory {self.path} cannot be written: {error}") from error

    def exists(self) -> bool:
        """Whether a server was ever asked for here."""
        return self.startup_lock.exists()

    def aof_size(self) -> int:
        """Bytes of the append-only files on disk: one file up to Redis 6, a directory from 7 on."""
        size = 0
        for file in (self.aof, *self.aof_parts.glob("*")):
            try:
                size += file.stat().st_size
            except FileNotFoundError:  # a rewrite has just replaced it
                continue
        return size


if sys.platform != "win32":  # Windows is refused, in words, when a data directory is prepared
    import fcntl


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


LONGEST = 107 if sys.platform == "linux" else 103  # bytes; sun_path without its closing zero
PATIENCE = 1.0  # seconds for one answer
NAME = "redis.sock"


def socket_path(directory: DataDirectory) -> Path:
    """In the data directory, or, where that path is too long for a socket, in a short temporary one."""
    near = directory.path / NAME
    if len(os.fsencode(near)) <= LONGEST:
        return near
    digest = hashlib.sha256(os.fsencode(directory.path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"perdure-{os.geteuid()}-{digest}" / NAME


def place_socket(directory: DataDirectory) -> Path:
    """Make the directory of a new server's socket; a stale socket in it the server replaces by itself.

    Raises:
        EmbeddedServerError: the short temporary directory belongs to somebody else, or is still too long.
    """
    path = socket_path(directory)
    if len(os.fsencode(path)) > LONGEST:
        raise EmbeddedServerError(
            f"{path} is too long for a socket ({LONGEST} bytes at most): "
            "name a shorter data directory, or a shorter TMPDIR"
        )
    if path.parent == directory.path:
        return path
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()  # not stat: a link made by somebody else is theirs
    except OSError as error:
        raise EmbeddedServerError(f"no socket can be made at {path}: {error}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EmbeddedServerError(
            f"{path.parent} should be a directory of user {os.geteuid()} alone, but is not: "
            "remove it, or name a shorter data directory"
        )
    return path


def ask(path: Path, command: str) -> str | None:
    """The reply to an inline command, an error reply with its leading minus; None if none came."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
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
    """Whether the server at `path` has read its data and takes commands."""
    reply = ask(path, "PING")
    return reply is not None and not reply.startswith("-LOADING")
