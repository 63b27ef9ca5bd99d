"""What an operator does with the server of a data directory: start, stop, look."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import EmbeddedServerError
from .files import POLL, DataDirectory, ask, exclusive, holders, is_free, socket_path
from .launch import STOPPED_WITHIN, read_record, stop_orphan
from .server import READY_WITHIN, EmbeddedServer

__all__ = ["ServerStatus", "start", "status", "stop"]

_LOOKS: Final = 5
"""How often the users' lock is looked at before somebody is taken for using the server."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server of one data directory at one moment."""

    running: bool
    """It answers; it may still be reading its data."""
    pid: int | None
    keeper_pid: int | None
    """None also while a server outlives its killed keeper; the next to join replaces it."""
    socket: Path
    """Where it listens, or would."""
    version: str | None
    binary: Path | None
    users: int | None
    """Processes that hold a share; None if some do and the system does not tell how many (macOS)."""
    used_memory: int | None
    """Bytes."""
    aof_size: int
    """Bytes on disk, also when it does not run."""
    pinned: bool
    """It stays when nobody uses it, until `stop`."""


def status(directory: Path) -> ServerStatus:
    """Look at the server of `directory`; starts, makes and changes nothing.

    Raises:
        EmbeddedServerError: the directory may not be read.
    """
    place = DataDirectory(directory)
    try:
        return _status(place)
    except OSError as error:
        raise EmbeddedServerError(f"the data directory {place.path} cannot be read: {error}") from error


def start(directory: Path) -> ServerStatus:
    """Run the server of `directory` until `stop`, whether anybody uses it or not.

    The pin is a file: a server that was killed is pinned again when the next one to join starts it.

    Raises:
        EmbeddedServerError: as `EmbeddedServer.ensure`.
    """
    place = DataDirectory(directory)
    with EmbeddedServer(directory):
        place.pinned.touch(mode=0o600)
        return _status(place)


def stop(directory: Path, force: bool = False) -> None:
    """Stop the server of `directory` and take its pin away; returns when it is gone.

    Does nothing if it does not run. With `force` it is stopped under its users: they lose their
    connection, and the next of them to call `ensure` starts it again.

    Raises:
        EmbeddedServerError: others still use it (then nothing was changed), or it did not go.
    """
    place = DataDirectory(directory)
    if not place.exists():
        return
    place.prepare()
    with exclusive(place.startup_lock, READY_WITHIN + STOPPED_WITHIN):
        if not force and not _is_unused(place):
            raise EmbeddedServerError(f"the server in {place.path} is still used by {_named(place)}")
        place.pinned.unlink(missing_ok=True)
        _end_keeper(place)
        stop_orphan(place)


def _status(place: DataDirectory) -> ServerStatus:
    known = place.exists()
    record = read_record(place) if known else None
    kept = record is not None and not is_free(place.keeper_lock)
    socket = record.socket if record else socket_path(place)
    said = ask(socket, "INFO") if known else None
    info = dict(line.split(":", 1) for line in (said or "").splitlines() if ":" in line)
    users = holders(place.users_lock) if known and place.users_lock.exists() else frozenset[int]()
    return ServerStatus(
        running="process_id" in info,
        pid=int(info["process_id"]) if "process_id" in info else None,
        keeper_pid=record.pid if record and kept else None,
        socket=socket,
        version=info.get("redis_version"),
        binary=record.program if record and kept else None,
        users=None if users is None else len(users),
        used_memory=int(info["used_memory"]) if "used_memory" in info else None,
        aof_size=place.aof_size(),
        pinned=place.pinned.exists(),
    )


def _is_unused(place: DataDirectory) -> bool:
    """Whether nobody uses the server. Asked more than once: when the last user has left, the keeper itself takes the
    users' lock for an instant, to see that it has.
    """
    for _ in range(_LOOKS):
        if is_free(place.users_lock):
            return True
        time.sleep(POLL)
    return False


def _named(place: DataDirectory) -> str:
    users = holders(place.users_lock)
    who = f"{len(users)} processes (pid {', '.join(map(str, sorted(users)))})" if users else "other processes"
    return f"{who}: end them first, or stop it by force"


def _end_keeper(place: DataDirectory) -> None:
    """Ask the keeper to stop the server and itself, and wait until it has. Call it with the startup lock."""
    deadline = time.monotonic() + STOPPED_WITHIN
    asked = None
    while not is_free(place.keeper_lock):
        record = read_record(place)
        if record is not None and record.pid != asked:
            os.kill(record.pid, signal.SIGTERM)
            asked = record.pid
        if time.monotonic() > deadline:
            raise EmbeddedServerError(f"the server in {place.path} did not stop within {STOPPED_WITHIN:.0f} seconds")
        time.sleep(POLL)
