"""The servers that everything is measured on: private, on loopback, started for the purpose and removed afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import hiredis
import redis

from ..raw import RawClient
from .sessions import Failed

__all__ = ["Postgres", "postgres", "postgres_version", "redis_server", "redis_version"]

_READY_WITHIN = 30.0
_STOPPED_WITHIN = 30.0
_DATA = Path(__file__).parents[2] / ".perdure"
"""Beside the code: the temporary folder may be in memory, where an fsync costs nothing."""

_NOT_ROOT = "postgres"
"""Postgres refuses to run as root: then it runs as this user, which its package makes."""


@contextmanager
def redis_server(*, fsync: bool) -> Iterator[str]:
    """The URL of a new redis-server on TCP. fsync: of every write, else nothing is kept on disk."""
    program = _redis_program()
    _DATA.mkdir(exist_ok=True)
    port = _free_port()
    kept = ("yes", "always") if fsync else ("no", "no")
    with TemporaryDirectory(prefix="bench-", dir=_DATA) as data:
        log = Path(data, "redis.log")
        options = ("--save", "", "--appendonly", kept[0], "--appendfsync", kept[1], "--logfile", log)
        server = subprocess.Popen(
            [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", data, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"redis://127.0.0.1:{port}/0"
            _wait_for_redis(server, url, log)
            yield url
        finally:
            # Without persistence there is nothing to save, and a SIGTERM waits for clients.
            server.kill()
            server.wait(_STOPPED_WITHIN)


def redis_version() -> str:
    """Of the redis-server that is measured on."""
    try:
        program = _redis_program()
    except Failed:
        return "none"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return next((word[2:] for word in said.split() if word.startswith("v=")), said.strip())


def _redis_program() -> str:
    """The system's, before the older one that a virtual environment may carry for embedded use."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    system = os.pathsep.join(folder for folder in folders if Path(folder) != own)
    program = shutil.which("redis-server", path=system) or shutil.which("redis-server", path=own)
    if program is None:
        raise Failed("no redis-server on PATH")
    return program


def _wait_for_redis(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN
    while True:
        try:
            with RawClient(url) as client:
                client.call("PING")
            return
        except (redis.ConnectionError, hiredis.HiredisError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace") if log.exists() else "it has no log"
                raise Failed(f"the redis-server did not start: {said}") from None
            time.sleep(0.01)


class Postgres:
    """A private cluster with its default settings, reached over loopback."""

    def __init__(self, programs: Path, port: int) -> None:
        self._programs = programs
        self._port = port

    def create(self, database: str) -> str:
        """A new database; returns its URL."""
        self._sql("postgres", f"CREATE DATABASE {database}")
        return f"postgresql://bench@127.0.0.1:{self._port}/{database}"

    def drop(self, database: str) -> None:
        """Remove a database, whoever is still connected."""
        self._sql("postgres", f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def setting(self, name: str) -> str:
        """The server's own word on one of its settings."""
        return self._sql("postgres", f"SHOW {name}")

    def _sql(self, database: str, statement: str) -> str:
        address = ("-h", "127.0.0.1", "-p", str(self._port), "-U", "bench", "-d", database)
        done = subprocess.run(
            [self._programs / "psql", *address, "-Atqc", statement], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"psql: {done.stderr.strip()}")
        return done.stdout.strip()


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A new cluster. Raises Failed when there is no Postgres, or no user that may run it."""
    programs = _postgres_programs()
    owner = _NOT_ROOT if os.geteuid() == 0 else None
    _DATA.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=_DATA) as folder:
        if owner is not None:
            try:
                user = pwd.getpwnam(owner)
            except KeyError:
                raise Failed(f"Postgres does not run as root, and there is no user {owner!r}") from None
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = Path(folder, "data")
        _run([programs / "initdb", "-D", data, "-U", "bench", "--auth=trust", "--encoding=UTF8"], owner, folder)
        port = _free_port()
        options = f"-h 127.0.0.1 -p {port} -k {folder}"
        log = Path(folder, "postgres.log")
        _run([programs / "pg_ctl", "-D", data, "-w", "-l", log, "-o", options, "start"], owner, folder)
        try:
            yield Postgres(programs, port)
        finally:
            _run([programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"], owner, folder)


def postgres_version() -> str:
    """Of the newest Postgres that is installed."""
    try:
        program = _postgres_programs() / "postgres"
    except Failed:
        return "none"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.removeprefix("postgres (PostgreSQL)").strip()


def _postgres_programs() -> Path:
    """The folder of initdb and the like: on PATH, or where Debian puts it."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if not found:
        raise Failed("no Postgres is installed")
    return found[-1].parent


def _run(command: Sequence[str | Path], owner: str | None, folder: str) -> None:
    # What pg_ctl starts keeps the standard streams: a pipe would never end.
    with Path(folder, "said").open("w+") as said:
        done = subprocess.run(
            [str(part) for part in command], user=owner, cwd=folder, stdout=said, stderr=said, check=False
        )
        said.seek(0)
        if done.returncode:
            raise Failed(f"{Path(command[0]).name}: {said.read().strip()[-400:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
