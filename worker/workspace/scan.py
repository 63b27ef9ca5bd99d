"""Scan of a workspace's folder: its files, and which of them have changed since they were saved.

Left out are symbolic links, which are never followed, sockets and other special files, names that a manifest cannot
have, and empty folders. What is removed during the scan is not found.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import orjson

from ...queues.regular_files import open_below, open_folder_below, read_bounded
from ...queues.transport.value_store import is_sha256
from ..errors import WorkspaceError, WorkspaceTooLarge

VERSION: Final = 1
"""Format that this code writes, and the latest that it reads."""

IGNORE_FILE: Final = ".perdureignore"
"""File in a workspace with patterns of files that are not saved, one per line."""

_MAX_PATH_LENGTH: Final = 1024
_MAX_NAME_LENGTH: Final = 255
"""Largest size of a path and of a name in it, in UTF-8 bytes."""

_DEEPEST: Final = 64
"""Largest number of folders in which a file is."""

_ROW: Final = 2 * _MAX_PATH_LENGTH + 128
"""Largest size of a file's row in a manifest, in bytes: JSON escapes some characters."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class SavedFile(NamedTuple):
    """Bytes of a file. hash: SHA-256 in hexadecimal. size: bytes."""

    hash: str
    size: int
    executable: bool = False


Manifest: TypeAlias = Mapping[str, SavedFile]
"""Files of a workspace by their paths from its folder, with `/` between names."""


class Limits(NamedTuple):
    """Limits of a workspace, for files that are saved and for those that are restored.

    bytes: of all files. files: their number. file_bytes: of one file.
    """

    bytes: int
    files: int
    file_bytes: int

    @property
    def manifest_bytes(self) -> int:
        """Largest size of a manifest."""
        return 128 + self.files * _ROW

    def check(self, what: str, path: str, size: int, total: int, files: int) -> None:
        """Raise `WorkspaceTooLarge` if a file of this size, after which these are the totals, exceeds a limit."""
        if size > self.file_bytes:
            raise WorkspaceTooLarge(
                f"{what}: file {path!r} has {size:,} bytes, more than {self.file_bytes:,}; list it in "
                f"{IGNORE_FILE}, or raise PERDURE_ARTIFACT_LIMIT"
            )
        if total > self.bytes:
            raise WorkspaceTooLarge(
                f"{what}: its files have more than {self.bytes:,} bytes; remove some, list them in "
                f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_LIMIT"
            )
        if files > self.files:
            raise WorkspaceTooLarge(
                f"{what}: it has more than {self.files:,} files; remove some, list their folders in "
                f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_FILES"
            )

    def check_all(self, what: str, files: Manifest) -> None:
        """Raise `WorkspaceTooLarge` if files exceed a limit."""
        total = 0
        for number, (path, file) in enumerate(files.items(), 1):
            total += file.size
            self.check(what, path, file.size, total, number)


def check_path(path: str) -> str | None:
    """Return what is wrong with the path of a file in a workspace, None if it is valid."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    if not 0 < size <= _MAX_PATH_LENGTH:
        return f"a path must have 1 to {_MAX_PATH_LENGTH} bytes in UTF-8, got {size}"
    if _CONTROL.search(path):
        return "its name contains a control character"
    return _check_names(path.split("/"))


def _check_names(names: Sequence[str]) -> str | None:
    if any(name in ("", ".", "..") for name in names):
        return "a path must stay within the workspace: no '..', and no '/' at its start or end"
    if len(names) > _DEEPEST + 1:
        return f"a file must be in at most {_DEEPEST} folders, got {len(names) - 1}"
    if any(len(name.encode()) > _MAX_NAME_LENGTH for name in names):
        return f"a name must have at most {_MAX_NAME_LENGTH} bytes in UTF-8"
    return None


def encode_manifest(files: Manifest) -> bytes:
    """Return the stored form; equal manifests have equal forms."""
    rows = [[path, *files[path]] for path in sorted(files)]
    return orjson.dumps({"v": VERSION, "files": rows})


def decode_manifest(what: str, data: bytes) -> dict[str, SavedFile]:
    """Read what `encode_manifest` returned. what: names the workspace in errors.

    Raises `WorkspaceError` for a damaged manifest, one of a later version, and one with a path outside the folder.
    """
    try:
        found = orjson.loads(data)
        version, rows = found["v"], found["files"]
        if not isinstance(version, int) or version < 1:
            raise ValueError("it has no version")
        if version > VERSION:
            raise WorkspaceError(
                f"{what}: its manifest has version {version}; this version of Perdure reads up to {VERSION}: update it"
            )
        files: dict[str, SavedFile] = {}
        for path, digest, size, executable in rows:
            problem = check_path(path)
            if problem is not None:
                raise ValueError(f"file {path!r}: {problem}")
            if not is_sha256(digest) or type(size) is not int or size < 0:
                raise ValueError(f"file {path!r} has no hash or no size")
            if path in files:
                raise ValueError(f"file {path!r} is there twice")
            files[path] = SavedFile(digest, size, executable is True)
        folders = {path[:at] for path in files for at, char in enumerate(path) if char == "/"}
        if (both := next((path for path in files if path in folders), None)) is not None:
            raise ValueError(f"{both!r} is a file and a folder")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkspaceError(f"{what}: could not read its manifest: {error}") from None
    return files


_IGNORED: Final = ("__pycache__", "*.pyc", ".venv", "node_modules", ".cache", ".mypy_cache", ".pytest_cache")
"""Patterns that hold in every workspace: what tools make again."""

_IGNORE_BYTES: Final = 65_536
_IGNORE_PATTERNS: Final = 1_000
_WILDCARDS: Final = 1_000
_MATCHERS: Final = 200
"""Limits of the ignore file: its bytes, its patterns, their wildcards, and the patterns that are more than a name or an
end such as `*.log`: each name is matched with all of these, by compiled patterns of which `fnmatch` keeps 256.
"""

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

    def __init__(self, what: str, folder: Path, limits: Limits) -> None:
        """Create a scanner. what: names the workspace in errors."""
        self._what = what
        self._folder = folder
        self._limits = limits
        self._saved: dict[str, tuple[_Signature, SavedFile]] = {}
        self._ignored = (b"", _Patterns(_IGNORED))

    def scan(self) -> FolderScan:
        """Return the files of the folder. It blocks.

        Raises:
            WorkspaceTooLarge: A limit is exceeded.
            WorkspaceError: The folder or its ignore file cannot be read.
        """
        known: dict[str, SavedFile] = {}
        changed: list[str] = []
        skipped: list[str] = []
        signatures: dict[str, tuple[_Signature | None, bool]] = {}
        size, now = 0, time.time()
        try:
            for path, found in self._walk(self._patterns(), skipped):
                size += found.st_size
                self._limits.check(self._what, path, found.st_size, size, len(known) + len(changed) + 1)
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

    def _walk(self, ignored: _Patterns, skipped: list[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files with their paths from the folder."""
        pending = [""]
        while pending:
            prefix = pending.pop()
            try:
                place = open_folder_below(self._folder, prefix.rstrip("/"))
            except (FileNotFoundError, NotADirectoryError):
                if prefix:
                    continue  # removed meanwhile, or replaced by a file or a link
                raise
            try:
                with os.scandir(place) as entries:
                    for entry in entries:
                        path = f"{prefix}{entry.name}"
                        if ignored.match(path, entry.name):
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
            finally:
                os.close(place)

    def _patterns(self) -> _Patterns:
        """Return what is not saved. Raises `WorkspaceError`: what a broken ignore file lists must not be saved."""
        try:
            with open_below(self._folder, IGNORE_FILE, limit=_IGNORE_BYTES) as file:
                data = read_bounded(file, _IGNORE_BYTES, IGNORE_FILE)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise WorkspaceError(
                f"{self._what}: could not read {IGNORE_FILE}: {error.strerror}; replace or remove it"
            ) from None
        if data == self._ignored[0]:
            return self._ignored[1]
        lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
        own = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
        problem = None
        if len(own) > _IGNORE_PATTERNS:
            problem = f"it has {len(own):,} patterns, more than {_IGNORE_PATTERNS:,}"
        elif sum(len(_WILD.findall(pattern)) for pattern in own) > _WILDCARDS:
            problem = f"its patterns have more than {_WILDCARDS:,} wildcards"
        patterns = _Patterns((*_IGNORED, *own))
        if patterns.matchers > _MATCHERS:
            problem = f"more than {_MATCHERS} of its patterns are neither names nor ends such as *.log"
        if problem is not None:
            raise WorkspaceError(f"{self._what}: could not use {IGNORE_FILE}: {problem}; shorten it")
        self._ignored = (data, patterns)
        return patterns


class _Patterns:
    """Patterns of what is not saved: one with `/` matches a path, any other one the name of a file or folder."""

    def __init__(self, patterns: Sequence[str]) -> None:
        names, paths = list[str](), list[str]()
        for pattern in dict.fromkeys(patterns):
            (paths if "/" in pattern else names).append(pattern.lstrip("/"))
        self._names, self._paths = _Set(names), _Set(paths)
        self.matchers = len(self._names.wild) + len(self._paths.wild)

    def match(self, path: str, name: str) -> bool:
        return self._names.match(name) or self._paths.match(path)


_WILD: Final = re.compile(r"[*?\[]")


class _Set:
    """Patterns that are matched at once: most are plain texts or ends such as `*.log`, others need a matcher each."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._plain = frozenset(text for text in patterns if not _WILD.search(text))
        self._ends = tuple(text[1:] for text in patterns if _is_end(text))
        self.wild = tuple(text for text in patterns if text not in self._plain and not _is_end(text))

    def match(self, text: str) -> bool:
        return (
            text in self._plain
            or text.endswith(self._ends)
            or any(fnmatch.fnmatchcase(text, pattern) for pattern in self.wild)
        )


def _is_end(pattern: str) -> bool:
    return pattern[:1] == "*" and not _WILD.search(pattern, 1)


def _signature(found: os.stat_result) -> _Signature:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode
