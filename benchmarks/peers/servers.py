"""The private servers of the benchmarks: on loopback, removed afterwards."""

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

from ..raw.client import RawClient
from .processes import Failed

__all__ = ["Postgres", "postgres", "postgres_version", "redis_server", "redis_version"]

_READY_WITHIN = 30.0
_STOPPED_WITHIN = 30.0
_DATA = Path(__file__).parents[2] / ".perdure"
"""Beside the code: the temporary folder may be in memory, where an fsync costs nothing."""

_NOT_ROOT = "postgres"
"""Postgres refuses to run as root; it then runs as this user, which its package creates."""


@contextmanager
def redis_server(*, fsync: bool) -> Iterator[str]:
    """Start a redis-server on TCP; yield its URL. fsync: every write; else no persistence."""
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
            # There is nothing to save, and SIGTERM would wait for clients.
            server.kill()
            server.wait(_STOPPED_WITHIN)


def redis_version() -> str:
    """Return the version of the redis-server in use."""
    try:
        program = _redis_program()
    except Failed:
        return "none"
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return next((word[2:] for word in output.split() if word.startswith("v=")), output.strip())


def _redis_program() -> str:
    """Return the system's program; a virtual environment may have an older one for the embedded server."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    system = os.pathsep.join(folder for folder in folders if Path(folder) != own)
    program = shutil.which("redis-server", path=system) or shutil.which("redis-server", path=own)
    if program is None:
        raise Failed("could not find redis-server on PATH")
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
                output = log.read_text(errors="replace") if log.exists() else "no log"
                raise Failed(f"could not start redis-server: {output}") from None
            time.sleep(0.01)


class Postgres:
    """A private Postgres with default settings, on loopback."""

    def __init__(self, programs: Path, port: int) -> None:
        self._programs = programs
        self._port = port

    def create(self, database: str) -> str:
        """Create a database; return its URL."""
        self._sql("postgres", f"CREATE DATABASE {database}")
        return f"postgresql://bench@127.0.0.1:{self._port}/{database}"

    def drop(self, database: str) -> None:
        """Remove a database, even if clients are connected."""
        self._sql("postgres", f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def setting(self, name: str) -> str:
        """Return a setting as the server reports it."""
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
    """Start a private Postgres. Raises Failed if it is not installed or there is no user to run it."""
    programs = _postgres_programs()
    owner = _NOT_ROOT if os.geteuid() == 0 else None
    _DATA.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=_DATA) as folder:
        if owner is not None:
            try:
                user = pwd.getpwnam(owner)
            except KeyError:
                raise Failed(
                    f"could not start Postgres: it does not run as root, and there is no user {owner!r}"
                ) from None
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
    """Return the version of the newest installed Postgres."""
    try:
        program = _postgres_programs() / "postgres"
    except Failed:
        return "none"
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return output.removeprefix("postgres (PostgreSQL)").strip()


def _postgres_programs() -> Path:
    """Return the folder of initdb: on PATH, or Debian's location."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if not found:
        raise Failed("could not find Postgres: it is not installed")
    return found[-1].parent


def _run(command: Sequence[str | Path], owner: str | None, folder: str) -> None:
    # The server keeps the standard streams of pg_ctl open: a pipe would never end.
    with Path(folder, "output").open("w+") as output:
        done = subprocess.run(
            [str(part) for part in command], user=owner, cwd=folder, stdout=output, stderr=output, check=False
        )
        output.seek(0)
        if done.returncode:
            raise Failed(f"{Path(command[0]).name}: {output.read().strip()[-400:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
