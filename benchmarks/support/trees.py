"""The code of another commit, as a package beside that of this tree."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from .origin import ROOT

__all__ = ["git", "unpack"]


def unpack(commit: str, folder: Path) -> None:
    """Write the tree of a commit as the package `perdure` in a folder. Raises `CalledProcessError` if it is unknown."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder / "perdure", filter="data")


def git(*arguments: str) -> str:
    """Return what git prints in this tree. Raises `CalledProcessError` if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
