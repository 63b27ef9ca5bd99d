"""One keeper and its server, from nothing; what the keeper says of itself; why a start failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import EmbeddedServerError
from .binary import find_server
from .config import write_config
from .directory import DataDirectory
from .locks import POLL, is_free
from .sockets import ask, place_socket, socket_path

__all__ = ["STOPPED_WITHIN", "KeeperRecord", "launch", "log_since", "log_size", "read_record", "stop_orphan"]

KEEPER = Path(__file__).with_name("keeper.py")
LAUNCHED_WITHIN = 30.0  # seconds for the keeper to start, lock and detach; the server comes after
STOPPED_WITHIN = 10.0  # seconds for a server to end; its keeper kills it after three
LARGEST_LOG = 1_000_000  # bytes, then it is put aside at the next start
QUOTED_LINES = 12


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """What a living keeper has written into its lock file."""

    pid: int
    server: int
    program: Path
    socket: Path


def read_record(directory: DataDirectory) -> KeeperRecord | None:
    """The record in the keeper's lock file; None if not whole. True while the lock is held."""
    try:
        facts = json.loads(directory.keeper_lock.read_bytes())
        return KeeperRecord(
            pid=facts["pid"],
            server=facts["server"],
            program=Path(facts["program"]),
            socket=Path(facts["socket"]),
        )
    except (OSError, ValueError, KeyError):
        return None


def launch(directory: DataDirectory) -> None:
    """Start a keeper, which starts the server. To be called with the startup lock, and no keeper alive.

    Returns once the keeper holds its lock, or has failed to; the server is then still starting.

    Raises:
        EmbeddedServerError: no program, no place for a socket, no disk space, an old server that stays.
    """
    stop_orphan(directory)
    program = find_server(directory)
    socket = place_socket(directory)
    try:
        os.truncate(directory.keeper_lock, 0)  # what the last keeper wrote is true no more
        write_config(directory, socket)
        if log_size(directory) > LARGEST_LOG:
            directory.log.replace(directory.log.with_name("redis.log.1"))
        directory.log.touch(mode=0o600)
        with directory.log.open("ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", KEEPER, directory.path, program, socket],
                stdin=subprocess.DEVNULL,
                stdout=log,  # never the caller's: a pipe behind it would not end before the server does
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise EmbeddedServerError(f"the server in {directory.path} cannot be started: {error}") from error
    try:
        keeper.wait(LAUNCHED_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise EmbeddedServerError(f"the keeper of {directory.path} hangs in its start") from error
    finally:
        keeper.kill()  # does nothing to one that has ended
        keeper.wait()


def stop_orphan(directory: DataDirectory) -> None:
    """Stop a server whose keeper is dead, so that the next one has the data for itself.

    On Linux such a server is already stopping by itself. Its users see a lost connection, and join anew.

    Raises:
        EmbeddedServerError: it did not go.
    """
    if is_free(directory.server_lock):
        return
    record = read_record(directory)
    socket = record.socket if record else socket_path(directory)
    ask(socket, "SHUTDOWN NOSAVE")  # no snapshot, that is; the append-only file is synced all the same
    deadline = time.monotonic() + STOPPED_WITHIN
    while not is_free(directory.server_lock):
        if time.monotonic() > deadline:
            who = f"process {record.server}" if record else "another process"
            raise EmbeddedServerError(
                f"a server from before ({who}) still holds the data in {directory.path}: end it by hand"
            )
        time.sleep(POLL)


def log_size(directory: DataDirectory) -> int:
    """Bytes in the server's log."""
    return directory.log.stat().st_size if directory.log.exists() else 0


def log_since(directory: DataDirectory, offset: int) -> str:
    """The last lines that came into the server's log after `offset`, for an error message."""
    try:
        with directory.log.open("rb") as log:
            if offset <= log_size(directory):  # else it was put aside, and this is a new one
                log.seek(offset)
            lines = log.read().decode(errors="replace").splitlines()[-QUOTED_LINES:]
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"the end of {directory.log}:\n  " + "\n  ".join(lines or ["(nothing was written)"])
