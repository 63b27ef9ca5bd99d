"""The file that a command reads: one on the disk, or stdin."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

from ....queues.regular_files import open_regular, read_bounded, read_regular
from .errors import Misuse

_LINE: Final = 1 << 28
"""Largest size of a line in bytes."""


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a regular file, or a copy of stdin for `-`: both can be read twice. Raises `Misuse`."""
    file: IO[bytes]
    try:
        if path == "-":
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; only its opening is misuse
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.seek(0)
        else:
            file = open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    with file:
        yield file


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, without white space around them and without empty ones.

    Raises `Misuse` for a line that is too long.
    """
    file.seek(0)
    number = 0
    while line := file.readline(_LINE + 1):
        number += 1
        if len(line) > _LINE:
            raise Misuse(f"line {number}: it has more than {_LINE:,} bytes")
        if text := line.strip():
            yield number, text


def read_text(path: str, limit: int) -> str:
    """Return the text of a regular file of at most so many bytes, or of stdin for `-`. Raises `Misuse`."""
    try:
        data = read_bounded(sys.stdin.buffer, limit, path) if path == "-" else read_regular(path, limit)
        return data.decode()
    except UnicodeDecodeError:
        raise Misuse(f"could not read {path}: it must be UTF-8") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: OSError) -> Misuse:
    return Misuse(f"could not read {path}: {error.strerror or error}")
