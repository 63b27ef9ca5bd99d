"""The command line under test: called in this process where that is equivalent, else as a process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from perdure.worker.cli import main

BOUND = 60.0
"""Seconds that a test waits for anything."""

COMMAND = (sys.executable, "-m", "perdure.worker.cli")

IGNORING_SIGINT = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Prefix of a command that starts it like a background job of a shell."""


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def ids(self) -> list[str]:
        return self.out.split()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def call(*args: str, stdin: bytes = b"") -> Answer:
    """Run one command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin))):
        try:
            main(list(args))
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code or 0
    return Answer(code, out.getvalue(), err.getvalue())


def process(*args: str, cwd: Path | None = None, stdin: bytes = b"") -> Answer:
    """Run one command as a process."""
    done = subprocess.run([*COMMAND, *args], cwd=cwd, input=stdin, capture_output=True, timeout=BOUND, check=False)
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


class Running:
    """A command that runs during the test. Its stdout is read line by line, its stderr after its exit."""

    def __init__(self, *args: str, cwd: Path, prefix: tuple[str, ...] = ()) -> None:
        self._err = (cwd / "stderr").open("w+b")
        self.process = subprocess.Popen([*prefix, *COMMAND, *args], cwd=cwd, stdout=subprocess.PIPE, stderr=self._err)
        self._guard = threading.Timer(BOUND, self.process.kill)
        self._guard.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()

    def line(self) -> str:
        """Return the next line of stdout; empty if the process exited without one."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def send(self, signal: int) -> None:
        self.process.send_signal(signal)

    def wait(self) -> Answer:
        """Wait within the bound until the command has exited."""
        out = b"" if self.process.stdout is None or self.process.stdout.closed else self.process.stdout.read()
        code = self.process.wait()
        self._guard.cancel()
        if self.process.stdout is not None:
            self.process.stdout.close()
        err = ""
        if not self._err.closed:
            self._err.seek(0)
            err = self._err.read().decode()
            self._err.close()
        return Answer(code, out.decode(), err)
