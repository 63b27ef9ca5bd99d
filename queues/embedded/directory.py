"""The data directory of an embedded server: its checks, and the names of its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import EmbeddedServerError

__all__ = ["DataDirectory"]


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
