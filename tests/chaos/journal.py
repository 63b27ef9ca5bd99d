"""Journal of a run: one file outside Redis, to which every process appends what it does, one line at a time.

A line is one `write` to a file opened with O_APPEND: lines of several processes never mix, and a written line survives
the process. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import orjson

__all__ = ["JOURNAL_NAME", "SECOND", "JournalWriter", "Line", "read_journal"]

JOURNAL_NAME: Final = "journal.jsonl"
"""Name of the file in the folder of a run."""

SECOND: Final = 1_000_000_000


class JournalWriter:
    """Appends lines of one process to the journal. The first line creates the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_NAME

    @cached_property
    def _file(self) -> int:
        return os.open(self._path, os.O_APPEND | os.O_WRONLY | os.O_CREAT, 0o644)

    def write(self, what: str, **more: Any) -> None:
        """Append one line."""
        line = {"at": time.clock_gettime_ns(time.CLOCK_MONOTONIC), "pid": os.getpid(), "what": what, **more}
        os.write(self._file, orjson.dumps(line) + b"\n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line. number: its place in the file, from 1. data: its other fields."""

    number: int
    at: int
    pid: int
    what: str
    data: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.data.get(name, default)

    def shown(self, since: int) -> str:
        """Return the line as text, with times in seconds after `since`."""
        rest = " ".join(f"{name}={_short(value)}" for name, value in self.data.items())
        return f"  line {self.number:>6}  {(self.at - since) / SECOND:9.3f} s  pid {self.pid}  {self.what}  {rest}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 160 else text[:157] + "..."


def read_journal(folder: Path) -> list[Line]:
    """Return all lines in the order of their times. Raises ValueError, which names the line that cannot be read."""
    with (folder / JOURNAL_NAME).open("rb") as file:
        return parse(file)


def parse(lines: Iterable[bytes]) -> list[Line]:
    """Parse lines of a journal; see `read_journal`."""
    found: list[Line] = []
    for number, text in enumerate(lines, 1):
        try:
            data = orjson.loads(text)
            found.append(Line(number, data.pop("at"), data.pop("pid"), data.pop("what"), data))
        except (orjson.JSONDecodeError, KeyError) as error:
            raise ValueError(f"line {number} of the journal cannot be read: {error}: {text[:200]!r}") from None
    found.sort(key=lambda line: line.at)
    return found
