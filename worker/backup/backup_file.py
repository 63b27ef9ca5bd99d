"""File of a backup: gzip of JSON lines, the last of which has their number and SHA-256.

    {"perdure_backup": 1, "namespace": ..., "format": ..., "time": ms, ...}          header
    {"k": key, "t": type, "x": ms at which it expires, "v": [...]}                   first page of a key
    {"k": key, "v": [...]}                                                           further page
    {"k": key, "stream": {...}} / {"k": key, "group": name, "pending": [...]}        state of a stream; what is pending
    {"lines": number, "keys": number, "sha256": digest of all lines before}          end

Keys and values are bytes; a character of their text is one byte (ISO 8859-1).
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import orjson

VERSION: Final = 1
"""Version of the file."""

_LEVEL: Final = 5
_MAX_LINE: Final = 1 << 30


class BackupError(Exception):
    """A file that is no complete backup, or a namespace that cannot be backed up or restored now."""


def to_text(data: bytes) -> str:
    """Return bytes as text of one character each."""
    return data.decode("latin-1")


def to_bytes(text: str) -> bytes:
    """Return the bytes of a text. Raises `BackupError`."""
    try:
        return text.encode("latin-1")
    except (AttributeError, UnicodeEncodeError):
        raise BackupError(f"a value has a character that is no byte: {text!r:.80}") from None


class BackupWriter:
    """Writes a backup. The end is written when the context is left without an error."""

    def __init__(self, file: IO[bytes], header: Mapping[str, Any]) -> None:
        self.keys = 0
        """Keys that were written so far."""
        self._lines = 0
        self._digest = hashlib.sha256()
        self._file = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, filename="", mtime=0)
        self.write({"perdure_backup": VERSION, **header})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            end = {"lines": self._lines, "keys": self.keys, "sha256": self._digest.hexdigest()}
            self._file.write(orjson.dumps(end) + b"\n")
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        data = orjson.dumps(line) + b"\n"
        self._lines += 1
        self._digest.update(data)
        self._file.write(data)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield header and pages of a backup, and check them. The check is complete when the iterator is exhausted.

    Raises:
        BackupError: The file is no backup, was cut off or has changed.
        OSError
    """
    digest, lines, line = hashlib.sha256(), 0, b""
    end: dict[str, Any] | None = None
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(_MAX_LINE):
                if end is not None:
                    raise BackupError(f"{path} has data after its end")
                found = orjson.loads(line)
                if "sha256" in found:
                    end = found
                    continue
                if not lines and found.get("perdure_backup") != VERSION:
                    raise BackupError(f"{path} is no backup of this version (file version {VERSION})")
                digest.update(line)
                lines += 1
                yield found
    except (EOFError, zlib.error, gzip.BadGzipFile, orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise BackupError(f"{path} is no complete backup: {error}") from error
    if end is None:
        raise BackupError(f"{path} is no complete backup: it was cut off after {lines} lines")
    if end.get("sha256") != digest.hexdigest() or end.get("lines") != lines:
        raise BackupError(f"{path} has changed since it was written: its checksum differs")


def check_file(path: Path) -> dict[str, Any]:
    """Read the whole file, and return its header with the number of its keys. Raises what `read_lines` does."""
    header: dict[str, Any] = {}
    keys = 0
    for line in read_lines(path):
        if not header:
            header = line
        elif "t" in line:
            keys += 1
        elif not isinstance(line.get("k"), str):
            raise BackupError(f"{path} is no backup: a line has no key")
    return header | {"keys": keys}
