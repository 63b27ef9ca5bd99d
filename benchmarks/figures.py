"""`python -m benchmarks.figures`: how old the figures of the documents are. With `--release` it refuses some.

Figures in a document stand beside a line that `benchmarks.support.origin` writes: the command, the commit, the day and
the machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer

from .support.origin import ROOT, Origin

__all__ = ["Figures", "documents", "figures"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a document. page: relative to the repository; line: of their origin, from 1."""

    page: str
    line: int
    origin: Origin

    def age(self, today: date) -> str:
        """Return the age in commits and days, and whether the measured code has no commit."""
        behind = _commits_since(self.origin.commit.partition("-")[0])
        days = (today - date.fromisoformat(self.origin.day)).days
        commits = "not in this history" if behind is None else _count(behind, "commit")
        return f"{commits}, {_count(days, 'day')}{', of a dirty tree' if self.origin.dirty else ''}"


def documents(root: Path = ROOT) -> list[Path]:
    """Return the documents that may have figures."""
    return [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]


def figures(root: Path = ROOT) -> Iterator[Figures]:
    """Yield the figures of all documents."""
    for path in documents(root):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            origin = Origin.parse(line)
            if origin is not None:
                yield Figures(path.relative_to(root).as_posix(), number, origin)


def main(
    release: Annotated[bool, typer.Option("--release", help="Fail if figures are of a dirty tree.")] = False,
) -> None:
    """Print the age of all figures, in commits before HEAD and in days."""
    found = list(figures())
    refused = [each for each in found if each.origin.dirty]
    today = datetime.now(UTC).date()
    for each in refused if release else found:
        print(f"{each.page}:{each.line}: {each.age(today)}: {each.origin.command}")
    if release and refused:
        print("a release needs figures of a commit: commit the code, then measure again with these commands")
        raise typer.Exit(1)


def _commits_since(commit: str) -> int | None:
    """Return how many commits HEAD is ahead of a commit; None if the history does not have it."""
    done = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    typer.run(main)
