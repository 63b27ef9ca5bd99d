"""Processes that are measured: started in sessions of their own, heard line by line, ended with all they started."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["Failed", "Session", "started"]

_LOG_SHOWN = 600
_GONE_WITHIN = 10.0


class Failed(Exception):
    """A process that is measured did not do what it was started for; says why, in words for the table."""


class Session:
    """One process with everything that it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._heard = b""

    def line(self, within: float, beside: Sequence[Session] = ()) -> dict[str, Any]:
        """The next line that it tells, within so many seconds; beside: sessions that must not end meanwhile."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                for session in beside:
                    session.check()
                if time.monotonic() > deadline:
                    raise Failed(f"nothing within the limit of {within:g} s{self._said()}")
                if selector.select(0.1):
                    part = os.read(self._process.stdout.fileno(), 65_536)
                    if not part:
                        raise Failed(f"ended too early{self._said()}")
                    self._heard += part
        first, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(first)
        if "failed" in found:
            raise Failed(found["failed"])
        return found

    def go(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise Failed if it has ended."""
        if self._process.poll() is not None:
            raise Failed(f"the worker ended with exit code {self._process.returncode}{self._said()}")

    def kill(self) -> float:
        """End it with SIGKILL, and all that it started; returns when."""
        now = time.monotonic()
        for process in (self._process.pid, *_of_session(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait(_GONE_WITHIN)
        return now

    def _said(self) -> str:
        said = self._log.read_text(errors="replace").strip()
        return f": ...{said[-_LOG_SHOWN:]}" if len(said) > _LOG_SHOWN else f": {said}" if said else ""


def _of_session(leader: int) -> Iterator[int]:
    """The processes of a session: some workers put their children into process groups of their own."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            yield int(folder.name)


@contextmanager
def started(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path, log: Path
) -> Iterator[Session]:
    """A command in a session of its own, dead on exit. log: where it writes its errors."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    session = Session(process, log)
    try:
        yield session
    finally:
        session.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
