"""Scan of a workspace's folder: its files, links and folders, and which files have changed since they were saved.

Links are read and never followed. Left out are sockets and other special files, and names that a manifest cannot have.
What is removed during the scan is not found.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ...queues.regular_files import open_below, open_folder_below, read_bounded
from ..errors import WorkspaceError
from .manifest import IGNORE_FILE, Limits, SavedFile, SavedLink, check_link, check_path

_MADE_AGAIN: Final = ("__pycache__", "*.pyc", ".venv", "node_modules", ".cache", ".mypy_cache", ".pytest_cache")
"""Patterns that hold in every workspace whose ignore file does not take them out: what tools make again."""

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
        links: Symbolic links.
        folders: Modes of all folders.
        skipped: Paths that are not saved: special files, and names that a manifest cannot have.
        signatures: Signatures and modes of the changed files; None for the signature of one that was written just now.
    """

    known: Mapping[str, SavedFile]
    changed: Sequence[str]
    links: Mapping[str, SavedLink]
    folders: Mapping[str, int]
    skipped: Sequence[str]
    signatures: Mapping[str, tuple[_Signature | None, int]]


class Scanner:
    """Scanner of one folder. It remembers which files are saved, so that only changed ones are read."""

    def __init__(self, what: str, folder: Path, limits: Limits) -> None:
        """Create a scanner. what: names the workspace in errors."""
        self._what = what
        self._folder = folder
        self._limits = limits
        self._saved: dict[str, tuple[_Signature, SavedFile]] = {}
        self._ignored = (b"", _Patterns(_MADE_AGAIN))

    def scan(self) -> FolderScan:
        """Return what the folder has. It blocks.

        Raises:
            WorkspaceTooLarge: A limit is exceeded.
            WorkspaceError: The folder or its ignore file cannot be read.
        """
        known, changed = dict[str, SavedFile](), list[str]()
        links, folders, skipped = dict[str, SavedLink](), dict[str, int](), list[str]()
        signatures = dict[str, tuple[_Signature | None, int]]()
        size, now = 0, time.time()
        try:
            for path, found in self._walk(self._patterns(), links, folders, skipped):
                size += found.st_size
                number = len(known) + len(changed) + len(links) + 1
                self._limits.check(self._what, path, found.st_size, size, number)
                signature = _signature(found)
                saved = self._saved.get(path)
                if saved is not None and saved[0] == signature:
                    known[path] = saved[1]
                    continue
                changed.append(path)
                settled = now - found.st_mtime > _SETTLED
                signatures[path] = (signature if settled else None, _mode(found))
        except OSError as error:
            raise WorkspaceError(f"{self._what}: could not read its folder: {error}") from error
        return FolderScan(known, changed, links, folders, skipped, signatures)

    def saved(self, scan: FolderScan, files: Mapping[str, SavedFile]) -> None:
        """Remember that the files of a scan are saved: no others, since their bytes may be collected meanwhile."""
        self._saved = {path: self._saved[path] for path in scan.known}
        for path, file in files.items():
            signature, _ = scan.signatures[path]
            if signature is not None:
                self._saved[path] = (signature, file)

    def _walk(
        self, ignored: _Patterns, links: dict[str, SavedLink], folders: dict[str, int], skipped: list[str]
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files with their paths from the folder, and collect what else there is."""
        roots = {os.fspath(self._folder), os.path.realpath(self._folder)}
        pending = [""]
        while pending:
            prefix = pending.pop()
            if (place := self._open(prefix)) is None:
                continue
            try:
                if prefix:
                    folders[prefix[:-1]] = _mode(os.fstat(place))
                    self._limits.check_folders(self._what, len(folders))
                with os.scandir(place) as entries:
                    for entry in entries:
                        path = f"{prefix}{entry.name}"
                        if ignored.match(path, entry.name) or _is_git_lock(path):
                            continue
                        if check_path(path) is not None:
                            skipped.append(path)
                            continue
                        try:
                            if entry.is_dir(follow_symlinks=False):
                                pending.append(f"{path}/")
                            elif entry.is_file(follow_symlinks=False):
                                yield path, entry.stat(follow_symlinks=False)
                            elif (link := _link(entry, place, roots)) is not None:
                                links[path] = link
                                self._limits.check(self._what, path, 0, 0, len(links))
                            else:
                                skipped.append(path)
                        except FileNotFoundError:
                            continue  # removed meanwhile
            finally:
                os.close(place)

    def _open(self, prefix: str) -> int | None:
        """Return a descriptor of a folder; None for one that was removed, or replaced by a file or a link."""
        try:
            return open_folder_below(self._folder, prefix.rstrip("/"))
        except (FileNotFoundError, NotADirectoryError):
            if prefix:
                return None
            raise

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
        lines = [line.strip() for line in data.decode(errors="surrogateescape").splitlines()]
        listed = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
        own = [line for line in listed if not line.startswith("!")]
        taken_out = {line[1:] for line in listed if line.startswith("!")}
        problem = None
        if (wrong := next((name for name in sorted(taken_out) if name not in _MADE_AGAIN), None)) is not None:
            problem = f"'!' takes out one of {', '.join(_MADE_AGAIN)}, got {wrong!r}"
        if len(own) > _IGNORE_PATTERNS:
            problem = f"it has {len(own):,} patterns, more than {_IGNORE_PATTERNS:,}"
        elif sum(len(_WILD.findall(pattern)) for pattern in own) > _WILDCARDS:
            problem = f"its patterns have more than {_WILDCARDS:,} wildcards"
        built_in = [pattern for pattern in _MADE_AGAIN if pattern not in taken_out]
        patterns = _Patterns((*built_in, *own))
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


def _is_git_lock(path: str) -> bool:
    """Return whether a file is a lock of git, which refuses to work beside one whose holder did not survive."""
    return path.endswith(".lock") and "/.git/" in f"/{path}"


def _mode(found: os.stat_result) -> int:
    """Return the permissions; a set-user-ID bit, which a restored file must not have, is not one."""
    return found.st_mode & 0o777


def _link(entry: os.DirEntry[str], place: int, roots: Collection[str]) -> SavedLink | None:
    """Return the link of an entry of an open folder; None for anything else. roots: names of the workspace's folder."""
    if not entry.is_symlink():
        return None
    try:
        target = os.readlink(entry.name, dir_fd=place)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FileNotFoundError(errno.ENOENT, "replaced meanwhile") from None
    for root in roots:
        if target == root or target.startswith(f"{root}/"):
            inside = SavedLink(target[len(root) + 1 :], inside=True)
            if check_link(inside) is None:
                return inside
    return SavedLink(target)
