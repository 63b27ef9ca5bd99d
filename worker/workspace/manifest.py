"""Manifest of a workspace: its files by path, each with the hash of its bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import orjson

from ...queues.transport.value_store import is_sha256
from ..errors import WorkspaceError, WorkspaceTooLarge

VERSION: Final = 1
"""Format that this code writes, and the latest that it reads."""

IGNORE_FILE: Final = ".perdureignore"
"""File in a workspace with patterns of files that are not saved, one per line."""

_LONGEST_PATH: Final = 1024
_LONGEST_NAME: Final = 255
"""Largest size of a path and of a name in it, in UTF-8 bytes."""

_DEEPEST: Final = 64
"""Largest number of folders in which a file is."""

_ROW: Final = 2 * _LONGEST_PATH + 128
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
    if not 0 < size <= _LONGEST_PATH:
        return f"a path must have 1 to {_LONGEST_PATH} bytes in UTF-8, got {size}"
    if _CONTROL.search(path):
        return "its name contains a control character"
    return _check_names(path.split("/"))


def _check_names(names: Sequence[str]) -> str | None:
    if any(name in ("", ".", "..") for name in names):
        return "a path must stay within the workspace: no '..', and no '/' at its start or end"
    if len(names) > _DEEPEST + 1:
        return f"a file must be in at most {_DEEPEST} folders, got {len(names) - 1}"
    if any(len(name.encode()) > _LONGEST_NAME for name in names):
        return f"a name must have at most {_LONGEST_NAME} bytes in UTF-8"
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
