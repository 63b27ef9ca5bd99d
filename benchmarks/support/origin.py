"""The origin of figures: the command that measured them, the commit of the code, the day and the machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

__all__ = ["DIRTY", "Origin", "commit_of_tree", "processor"]

ROOT = Path(__file__).parents[2]

DIRTY = "-dirty"
"""End of a commit if the measured code differs from it."""

_MEASURED = ("*.py", "*.lua", "pyproject.toml")
"""The files whose changes make a tree dirty: a run writes its figures into documents, which it does not measure."""

_UNKNOWN = "unknown"
_LINE = re.compile(
    r"^Figures: `(?P<command>[^`]+)`, commit `(?P<commit>[0-9a-z-]+)`, (?P<day>\d{4}-\d{2}-\d{2}), (?P<machine>.+)\.$"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where figures come from. commit: 12 digits, with `-dirty` if the code differed. day: as YYYY-MM-DD, UTC.

    machine: cores, processor, system, Python and servers, in one line.
    """

    command: str
    commit: str
    day: str
    machine: str

    @classmethod
    def now(cls, command: str, *servers: str) -> Self:
        """Return the origin of figures that this process measures. servers: name and version of each."""
        machine = [
            f"{os.cpu_count()} cores ({processor()})",
            f"{platform.system()} {platform.machine()}",
            f"Python {platform.python_version()}",
            f"load {os.getloadavg()[0]:.1f}",
            *servers,
        ]
        return cls(command, commit_of_tree(), datetime.now(UTC).date().isoformat(), ", ".join(machine))

    @classmethod
    def parse(cls, line: str) -> Self | None:
        """Return the origin that a line of a document states, None if it states none."""
        found = _LINE.match(line.strip())
        return cls(**found.groupdict()) if found else None

    def line(self) -> str:
        """Return the line that stands beside the figures in a document."""
        return f"Figures: `{self.command}`, commit `{self.commit}`, {self.day}, {self.machine}."

    @property
    def dirty(self) -> bool:
        """Whether no commit has the code that was measured."""
        return self.commit == _UNKNOWN or self.commit.endswith(DIRTY)


def commit_of_tree(root: Path = ROOT) -> str:
    """Return the commit of a working tree, marked if measured files differ from it."""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", *_MEASURED, ":!docs", ":!tests")
    except (OSError, subprocess.CalledProcessError):
        return _UNKNOWN
    return f"{head}{DIRTY}" if changed else head


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
