"""Manifest of a workspace: its files by path, each with the hash of its bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

import orjson

from ..errors import WorkspaceError

__all__ = ["Manifest", "SavedFile", "check_path", "decode_manifest", "encode_manifest"]

VERSION: Final = 1
"""Format that this code writes, and the latest that it reads."""

_LONGEST_PATH: Final = 1024
"""Largest size of a path in UTF-8 bytes."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_HASH: Final = re.compile(r"[0-9a-f]{64}")


class SavedFile(NamedTuple):
    """Bytes of a file. hash: SHA-256 in hexadecimal. size: bytes."""

    hash: str
    size: int
    executable: bool = False


Manifest: TypeAlias = Mapping[str, SavedFile]
"""Files of a workspace by their paths from its folder, with `/` between names."""


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
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "a path must stay within the workspace: no '..', and no '/' at its start or end"
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
        files = {}
        for path, digest, size, executable in rows:
            problem = check_path(path)
            if problem is not None:
                raise ValueError(f"file {path!r}: {problem}")
            if not _HASH.fullmatch(digest) or not isinstance(size, int) or size < 0:
                raise ValueError(f"file {path!r} has no hash or no size")
            files[path] = SavedFile(digest, size, bool(executable))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkspaceError(f"{what}: could not read its manifest: {error}") from None
    return files
