"""Lines of an exported task.

Each line is a JSON object with a `kind`. In order: the `header`, the `arguments`, fields of the `checkpoint` and of the
`inbox`, each `event` of the log, each `artifact` followed by its `chunk` lines, each `memory`, and the `end` with the
number of the lines before it and their SHA-256. Bytes are a `text` where they are UTF-8, else `base64`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import IO, Any, Final

import orjson

from ..errors import TransferError

FORMAT: Final = "perdure-task"

VERSION: Final = 1

_LONGEST: Final = 1 << 28
"""Largest size of a line in bytes."""


class LineWriter:
    """Writer of lines that counts and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._lines = 0

    def write(self, kind: str, data: bytes | None = None, /, **fields: Any) -> None:
        """Write a line, with bytes if there are any."""
        line = orjson.dumps({"kind": kind, **fields, **({} if data is None else _pack(data))}) + b"\n"
        self._hash.update(line)
        self._lines += 1
        self._file.write(line)

    def end(self) -> str:
        """Write the last line; return the digest."""
        digest = self._hash.hexdigest()
        self._file.write(orjson.dumps({"kind": "end", "lines": self._lines, "sha256": digest}) + b"\n")
        return digest


def _pack(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def unpack(line: dict[str, Any]) -> bytes:
    """Return the bytes of a line. Raises `ValueError`, `TypeError`, `KeyError`."""
    if "text" in line:
        if not isinstance(line["text"], str):
            raise TypeError("text: it must be a text")
        return line["text"].encode()
    try:
        return base64.b64decode(line["base64"], validate=True)
    except (ValueError, TypeError):
        raise ValueError("base64: it is not valid") from None


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines but the last with their numbers, and check the last. Raises `TransferError`.

    A damaged file may yield lines before it raises.
    """
    found, number = hashlib.sha256(), 0
    while text := file.readline(_LONGEST):
        number += 1
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            line = None
        if number == 1:
            _check_header(line)
        if not isinstance(line, dict) or not text.endswith(b"\n"):
            raise TransferError(f"line {number} is damaged, or the file is truncated there: export it again")
        if line.get("kind") == "end":
            if line.get("lines") != number - 1 or line.get("sha256") != found.hexdigest():
                raise TransferError(f"line {number}: the lines before it were changed or are missing: export it again")
            if file.read(1):
                raise TransferError(f"line {number + 1}: nothing may follow the last line of a file")
            return
        found.update(text)
        yield number, line
    raise TransferError(
        f"the file is truncated after line {number}: export it again" if number else "the file is empty"
    )


def _check_header(line: Any) -> None:
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise TransferError("line 1: the file is not one that 'perdure task export' wrote")
    version = line.get("version")
    if type(version) is not int:
        raise TransferError("line 1: version: it must be a number")
    if version != VERSION:
        raise TransferError(
            f"line 1: the file has version {version}; this version of Perdure reads version {VERSION}: update it"
        )
