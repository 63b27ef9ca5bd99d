"""The file that a command reads: one on the disk, or stdin."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import Misuse

__all__ = ["opened"]


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a file, or a copy of stdin for `-`, which can then be read twice. Raises `Misuse`."""
    file: IO[bytes]
    try:
        if path == "-":
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; only its opening is misuse
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.seek(0)
        else:
            file = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise Misuse(f"could not read {path}: {error.strerror or error}") from None
    with file:
        yield file
