"""Measured processes: each has its own session, reports line by line, and ends with all processes it started."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Failed", "Session", "started"]

_LOG_SHOWN = 600
_GONE_WITHIN = 10.0


class Failed(Exception):
    """A measured process failed; the text is the reason shown in the table."""


class Session:
    """One process with all processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._received = b""

    def line(self, within: float, beside: Sequence[Session] = ()) -> dict[str, Any]:
        """Return the next line, within so many seconds. beside: sessions that must not exit meanwhile."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                for session in beside:
                    session.check()
                if time.monotonic() > deadline:
                    raise Failed(f"no output within {within:g} s{self._log_tail()}")
                if selector.select(0.1):
                    part = os.read(self._process.stdout.fileno(), 65_536)
                    if not part:
                        raise Failed(f"exited early{self._log_tail()}")
                    self._received += part
        first, _, self._received = self._received.partition(b"\n")
        found: dict[str, Any] = json.loads(first)
        if "failed" in found:
            raise Failed(found["failed"])
        return found

    def go(self) -> None:
        """Let the process continue."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise Failed if the process has exited."""
        if self._process.poll() is not None:
            raise Failed(f"the worker exited with code {self._process.returncode}{self._log_tail()}")

    def kill(self) -> float:
        """Send SIGKILL to the process and all processes it started; return when."""
        now = time.monotonic()
        for process in self._all():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_GONE_WITHIN)
        return now

    def _all(self) -> list[psutil.Process]:
        """Return the process and its descendants, first the parents: some workers give children their own session."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace").strip()
        return f": ...{text[-_LOG_SHOWN:]}" if len(text) > _LOG_SHOWN else f": {text}" if text else ""


@contextmanager
def started(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path, log: Path
) -> Iterator[Session]:
    """Run a command in its own session, dead on exit. log: the file of its stderr."""
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
