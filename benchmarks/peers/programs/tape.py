"""A file of times that the handlers of every peer write to: what is measured costs the same for all of them.

Each task has a number and a row: when its handler began, when it ended, and in which process. The times are
`time.monotonic()`, which all processes of a machine share on Linux and macOS. The file is mapped into memory, so that a
time is one store, without a system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

__all__ = ["Tape"]

_ROW = struct.Struct("=ddq")
_TIME = struct.Struct("=d")
_END = _TIME.size
_PROCESS = struct.Struct("=q")
_PROCESS_AT = 2 * _TIME.size


class Tape:
    """The rows of all tasks; zero stands for what has not happened."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._rows = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def make(path: Path, tasks: int) -> None:
        """An empty tape for so many tasks."""
        path.write_bytes(bytes(_ROW.size * tasks))

    @classmethod
    def from_environment(cls) -> Tape:
        """The tape that the process was told of."""
        return cls(os.environ["BENCH_TAPE"])

    def begin(self, number: int) -> None:
        """The handler of this task begins, in this process."""
        at = number * _ROW.size
        _PROCESS.pack_into(self._rows, at + _PROCESS_AT, os.getpid())
        _TIME.pack_into(self._rows, at, time.monotonic())

    def end(self, number: int) -> None:
        """The handler of this task returns."""
        _TIME.pack_into(self._rows, number * _ROW.size + _END, time.monotonic())

    def began(self, number: int) -> float:
        """When the handler of this task began last."""
        return float(_TIME.unpack_from(self._rows, number * _ROW.size)[0])

    def ended(self, number: int) -> float:
        """When the handler of this task returned last."""
        return float(_TIME.unpack_from(self._rows, number * _ROW.size + _END)[0])

    def process(self, number: int) -> int:
        """The process id in which the handler of this task began last."""
        return int(_PROCESS.unpack_from(self._rows, number * _ROW.size + _PROCESS_AT)[0])
