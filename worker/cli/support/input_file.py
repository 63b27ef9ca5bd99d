"""The file that a command reads: one on the disk, or stdin."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import Failed

__all__ = ["opened"]


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a file, or a copy of stdin for `-`, which can then be read twice."""
    try:
        if path == "-":
            with tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
                yield copy
        else:
            with Path(path).open("rb") as file:
                yield file
    except OSError as error:
        raise Failed(f"could not read {path}: {error.strerror or error}") from None
