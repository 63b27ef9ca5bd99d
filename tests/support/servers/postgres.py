"""PostgreSQL server for tests: with pgvector, on a unix socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

__all__ = ["PostgresServer", "find_postgres"]

_OPTIONS = "-c listen_addresses='' -c fsync=off -c shared_buffers=16MB -c max_connections=60 -c autovacuum=off"


def find_postgres() -> Path | None:
    """The folder of the programs, which a wheel of the test group brings; None where it has none for this host."""
    found = find_spec("pgserver")
    if found is None or found.origin is None:
        return None
    programs = Path(found.origin).parent / "pginstall" / "bin"
    return programs if (programs / "postgres").exists() else None


class PostgresServer:
    """A PostgreSQL server in a temporary folder. It refuses to run as root, so root runs it as an unprivileged user."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user: dict[str, Any] = (
            {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if not os.getuid() else {}
        )
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-postgres-", dir="/tmp"))  # a socket's path is short

    def start(self) -> PostgresServer:
        if self._user:
            os.chown(self._folder, pwd.getpwnam("nobody").pw_uid, -1)
            if not all(parent.stat().st_mode & stat.S_IXOTH for parent in self._programs.parents):
                self._copy_programs()
        self._run("initdb", "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-locale")
        log = self._folder / "log"
        self._run("pg_ctl", "--wait", "-o", f"-k {self._folder} {_OPTIONS}", "-l", str(log), "start")
        return self

    def stop(self) -> None:
        try:
            self._run("pg_ctl", "--wait", "-m", "immediate", "stop")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        """End it as a crash would, and start it again."""
        self._run("pg_ctl", "--wait", "-m", "immediate", "stop")
        self._run("pg_ctl", "--wait", "-o", f"-k {self._folder} {_OPTIONS}", "-l", str(self._folder / "log"), "start")

    def url(self, database: str, user: str = "postgres") -> str:
        return f"postgresql:///{database}?host={self._folder}&user={user}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(sql.Identifier(name)))
        return self.url(name)

    def _copy_programs(self) -> None:
        """To where others than root may go."""
        package = self._programs.parent.parent
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.exists():
                shutil.copytree(part, self._folder / part.name)
        self._programs = self._folder / self._programs.relative_to(package.parent)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        done = subprocess.run(
            command, check=False, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **self._user
        )
        assert done.returncode == 0, done.stderr.decode()
