"""A memory-mapped file of start and end times, which the handlers of every project write at the same cost.

Each task has a number and a row: start, end and process id of its handler. Times are `time.monotonic()`, which all
processes of a machine share on Linux and macOS. Writing a time is one store, without a system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

__all__ = ["TimeFile"]

_ROW = struct.Struct("=ddq")
_TIME = struct.Struct("=d")
_END = _TIME.size
_PROCESS = struct.Struct("=q")
_PROCESS_AT = 2 * _TIME.size


class TimeFile:
    """The rows of all tasks; zero means that the event has not happened."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._rows = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def make(path: Path, tasks: int) -> None:
        """Create an empty time file for so many tasks."""
        path.write_bytes(bytes(_ROW.size * tasks))

    @classmethod
    def from_environment(cls) -> TimeFile:
        """Open the time file that BENCH_TIMES names."""
        return cls(os.environ["BENCH_TIMES"])

    def begin(self, number: int) -> None:
        """Record the start of a handler in this process."""
        at = number * _ROW.size
        _PROCESS.pack_into(self._rows, at + _PROCESS_AT, os.getpid())
        _TIME.pack_into(self._rows, at, time.monotonic())

    def end(self, number: int) -> None:
        """Record the end of a handler."""
        _TIME.pack_into(self._rows, number * _ROW.size + _END, time.monotonic())

    def began(self, number: int) -> float:
        """Return the last start of a handler."""
        return float(_TIME.unpack_from(self._rows, number * _ROW.size)[0])

    def ended(self, number: int) -> float:
        """Return the last end of a handler."""
        return float(_TIME.unpack_from(self._rows, number * _ROW.size + _END)[0])

    def process(self, number: int) -> int:
        """Return the process id of the last start of a handler."""
        return int(_PROCESS.unpack_from(self._rows, number * _ROW.size + _PROCESS_AT)[0])
