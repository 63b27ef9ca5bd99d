"""Scan of a workspace's folder: its files, and which of them have changed since they were saved.

Left out are symbolic links, which are never followed, sockets and other special files, names that a manifest cannot
have, and empty folders. What is removed during the scan is not found.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, TypeAlias

from ..errors import WorkspaceError, WorkspaceTooLarge
from .manifest import SavedFile, check_path

__all__ = ["IGNORE_FILE", "FolderScan", "Scanner"]

IGNORE_FILE: Final = ".perdureignore"
"""File in a workspace with patterns of files that are not saved, one per line."""

_IGNORED: Final = ("__pycache__", "*.pyc", ".venv", "node_modules", ".cache", ".mypy_cache", ".pytest_cache")
"""Patterns that hold in every workspace: what tools make again."""

_SETTLED: Final = 0.1
"""Seconds after which another change of a file shows in its times: file systems count them in steps of milliseconds."""

_Signature: TypeAlias = tuple[int, int, int, int, int]
"""Times, size, inode and mode of a file, which change with its content."""


@dataclass(frozen=True, slots=True)
class FolderScan:
    """Files of a folder at one time.

    Attributes:
        known: Files that are saved and unchanged.
        changed: Paths of the other files.
        skipped: Paths that are not saved: those of links, special files, and names that a manifest cannot have.
        signatures: Signatures of the changed files; None for one that was written just now.
    """

    known: Mapping[str, SavedFile]
    changed: Sequence[str]
    skipped: Sequence[str]
    signatures: Mapping[str, tuple[_Signature | None, bool]]


class Scanner:
    """Scanner of one folder. It remembers which files are saved, so that only changed ones are read."""

    def __init__(self, what: str, folder: Path, *, most_bytes: int, most_files: int, largest: int) -> None:
        """Create a scanner.

        Args:
            what: Names the workspace in errors.
            folder: The folder.
            most_bytes, most_files: Limits of the workspace.
            largest: Limit of one file in bytes.
        """
        self._what = what
        self._folder = folder
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._largest = largest
        self._saved: dict[str, tuple[_Signature, SavedFile]] = {}

    def scan(self) -> FolderScan:
        """Return the files of the folder. It blocks.

        Raises:
            WorkspaceTooLarge: A limit is exceeded.
            WorkspaceError: The folder cannot be read.
        """
        known: dict[str, SavedFile] = {}
        changed: list[str] = []
        skipped: list[str] = []
        signatures: dict[str, tuple[_Signature | None, bool]] = {}
        size, now = 0, time.time()
        try:
            for path, found in self._walk(self._patterns(), skipped):
                size += found.st_size
                self._check(path, found.st_size, size, len(known) + len(changed) + 1)
                signature = _signature(found)
                saved = self._saved.get(path)
                if saved is not None and saved[0] == signature:
                    known[path] = saved[1]
                    continue
                changed.append(path)
                settled = now - found.st_mtime > _SETTLED
                signatures[path] = (signature if settled else None, bool(found.st_mode & stat.S_IXUSR))
        except OSError as error:
            raise WorkspaceError(f"{self._what}: could not read its folder: {error}") from error
        return FolderScan(known, changed, skipped, signatures)

    def saved(self, scan: FolderScan, files: Mapping[str, SavedFile]) -> None:
        """Remember that the files of a scan are saved: no others, since their bytes may be collected meanwhile."""
        self._saved = {path: self._saved[path] for path in scan.known}
        for path, file in files.items():
            signature, _ = scan.signatures[path]
            if signature is not None:
                self._saved[path] = (signature, file)

    def _walk(self, patterns: Sequence[str], skipped: list[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files with their paths from the folder."""
        pending = [""]
        while pending:
            prefix = pending.pop()
            try:
                entries = os.scandir(self._folder / prefix)
            except (FileNotFoundError, NotADirectoryError):
                if prefix:
                    continue  # removed meanwhile, or replaced by a file
                raise
            with entries:
                for entry in entries:
                    path = f"{prefix}{entry.name}"
                    if _is_ignored(path, entry.name, patterns):
                        continue
                    if check_path(path) is not None:
                        skipped.append(path)
                    elif entry.is_dir(follow_symlinks=False):
                        pending.append(f"{path}/")
                    elif entry.is_file(follow_symlinks=False):
                        try:
                            yield path, entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # removed meanwhile
                    else:
                        skipped.append(path)

    def _patterns(self) -> tuple[str, ...]:
        try:
            lines = (self._folder / IGNORE_FILE).read_text(errors="replace").splitlines()
        except (FileNotFoundError, IsADirectoryError):
            lines = []
        own = [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]
        return (*_IGNORED, *own)

    def _check(self, path: str, size: int, total: int, files: int) -> None:
        if size > self._largest:
            raise WorkspaceTooLarge(
                f"{self._what}: file {path!r} has {size:,} bytes, more than {self._largest:,}; list it in "
                f"{IGNORE_FILE}, or raise PERDURE_ARTIFACT_LIMIT"
            )
        if total > self._most_bytes:
            raise WorkspaceTooLarge(
                f"{self._what}: its files have more than {self._most_bytes:,} bytes; remove some, list them in "
                f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_LIMIT"
            )
        if files > self._most_files:
            raise WorkspaceTooLarge(
                f"{self._what}: it has more than {self._most_files:,} files; remove some, list their folders in "
                f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_FILES"
            )


def _signature(found: os.stat_result) -> _Signature:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


def _is_ignored(path: str, name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches: one with `/` the path, any other one the name of a file or folder."""
    return any(fnmatchcase(path if "/" in pattern else name, pattern.lstrip("/")) for pattern in patterns)
