"""Operator commands for the server of a data directory: start, stop, status."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import EmbeddedServerError
from ..private_files import open_private
from .files import POLL, DataDirectory, ask, exclusive, holders, is_free, socket_path
from .launch import STOPPED_WITHIN, read_record, stop_orphan
from .server import READY_WITHIN, EmbeddedServer

_CHECKS: Final = 5
"""Number of times that the users' lock must be held before the server counts as used."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Snapshot of the state of one data directory's server."""

    running: bool
    """Whether it answers; it may still be loading its data."""
    pid: int | None
    watchdog_pid: int | None
    """None also while a server outlives its killed watchdog; the next process to join replaces it."""
    socket: Path
    """The socket on which it listens, or would listen."""
    version: str | None
    """Name and number: Valkey 9.1.2, or Redis 7.0.15."""
    binary: Path | None
    users: int | None
    """Number of processes with a share; None if the system does not report it (macOS)."""
    used_memory: int | None
    """Bytes."""
    aof_size: int
    """Bytes on disk, also if it does not run."""
    pinned: bool
    """Whether it runs without users until `stop`."""


def status(directory: Path) -> ServerStatus:
    """Return the state of the server of `directory`, and change nothing.

    Raises:
        EmbeddedServerError: the directory is not readable.
    """
    data = DataDirectory(directory)
    try:
        return _status(data)
    except OSError as error:
        raise EmbeddedServerError(f"could not read the data directory {data.path}: {error}") from error


def start(directory: Path) -> ServerStatus:
    """Run the server of `directory` until `stop`, with or without users.

    The pin is a file, so it outlives a server that is killed.

    Raises:
        EmbeddedServerError: as `EmbeddedServer.ensure`.
    """
    data = DataDirectory(directory)
    with EmbeddedServer(directory):
        try:
            os.close(open_private(data.pinned, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise EmbeddedServerError(f"could not create {data.pinned}: {error}") from error
        return _status(data)


def stop(directory: Path, force: bool = False) -> None:
    """Stop the server of `directory`, remove its pin, and return when it has ended.

    Does nothing if it does not run. With `force`, a server in use is stopped as well: its users lose their connection,
    and the next of them that calls `ensure` starts it again.

    Raises:
        EmbeddedServerError: other processes use it (nothing was changed), or it did not stop.
    """
    data = DataDirectory(directory)
    if not data.exists():
        return
    data.prepare()
    with exclusive(data.startup_lock, READY_WITHIN + STOPPED_WITHIN):
        if not force and not _is_unused(data):
            raise EmbeddedServerError(f"the server in {data.path} is still used by {_users(data)}")
        data.pinned.unlink(missing_ok=True)
        _stop_watchdog(data)
        stop_orphan(data)


def _status(data: DataDirectory) -> ServerStatus:
    known = data.exists()
    record = read_record(data) if known else None
    supervised = record is not None and not is_free(data.watchdog_lock)
    socket = record.socket if record else socket_path(data)
    reply = ask(socket, "INFO") if known else None
    info = dict(line.split(":", 1) for line in (reply or "").splitlines() if ":" in line)
    users = holders(data.users_lock) if known and data.users_lock.exists() else frozenset[int]()
    return ServerStatus(
        running="process_id" in info,
        pid=int(info["process_id"]) if "process_id" in info else None,
        watchdog_pid=record.pid if record and supervised else None,
        socket=socket,
        version=_version(info),
        binary=record.program if record and supervised else None,
        users=None if users is None else len(users),
        used_memory=int(info["used_memory"]) if "used_memory" in info else None,
        aof_size=data.aof_size(),
        pinned=data.pinned.exists(),
    )


def _version(info: dict[str, str]) -> str | None:
    if "valkey_version" in info:  # its redis_version is the Redis that it is compatible with
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}" if "redis_version" in info else None


def _is_unused(data: DataDirectory) -> bool:
    """Whether no process uses the server.

    The lock is checked several times, because the watchdog holds it for an instant after the last user has left.
    """
    for _ in range(_CHECKS):
        if is_free(data.users_lock):
            return True
        time.sleep(POLL)
    return False


def _users(data: DataDirectory) -> str:
    users = holders(data.users_lock)
    holders_text = f"{len(users)} processes (pid {', '.join(map(str, sorted(users)))})" if users else "other processes"
    return f"{holders_text}: end them first, or stop the server with force"


def _stop_watchdog(data: DataDirectory) -> None:
    """Stop the watchdog and its server, and wait for their end. The caller holds the startup lock."""
    deadline = time.monotonic() + STOPPED_WITHIN
    signalled = None
    while not is_free(data.watchdog_lock):
        record = read_record(data)
        if record is not None and record.pid != signalled:
            os.kill(record.pid, signal.SIGTERM)
            signalled = record.pid
        if time.monotonic() > deadline:
            raise EmbeddedServerError(f"the server in {data.path} did not stop within {STOPPED_WITHIN:.0f} seconds")
        time.sleep(POLL)
