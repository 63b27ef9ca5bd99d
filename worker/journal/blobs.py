"""Large values of a state, out of line: stored once by their content, however many snapshots have them.

In the place of a large value stands `{"$ref": "sha256:HEX"}`. An object of the user's that looks like that is
`{"$ref": [...]}` in the stored form, so that nothing is taken for a reference that is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson

__all__ = ["BLOB", "LARGE", "BadBlob", "blob_key", "join", "split"]

BLOB: Final = "#blob:"
"""What the keys of blobs in the checkpoint begin with; the SHA-256 of their bytes follows, in hexadecimal."""

LARGE: Final = 16 * 1024
"""Bytes of JSON above which a value goes out of line."""

_REF: Final = "$ref"
_HASH: Final = "sha256:"


class BadBlob(ValueError):
    """A large value is missing, or is not what its hash says."""


def blob_key(data: bytes) -> str:
    """The key under which a value's JSON is kept."""
    return BLOB + hashlib.sha256(data).hexdigest()


def split(value: Any, blobs: dict[str, bytes] | None) -> Any:
    """The value in its stored form. blobs: takes what goes out of line, by key; None leaves everything in its place.

    What is innermost goes first, so that a large object of small parts is stored anew only where it is large itself.
    The value as a whole stays where it is.
    """
    return _children(value, blobs)[0]


def _split(value: Any, blobs: dict[str, bytes] | None) -> tuple[Any, int]:
    stored, size = _children(value, blobs)
    if blobs is None or size <= LARGE:
        return stored, size
    data = orjson.dumps(stored)
    key = blob_key(data)
    blobs[key] = data
    return {_REF: _HASH + key.removeprefix(BLOB)}, _REFERENCE


_REFERENCE: Final = len('{"$ref":"sha256:"}') + 64


def _children(value: Any, blobs: dict[str, bytes] | None) -> tuple[Any, int]:
    """The value with its parts in their stored form, and the bytes of its JSON."""
    match value:
        case list():
            parts = [_split(part, blobs) for part in value]
            return [part for part, _ in parts], max(2, sum(size + 1 for _, size in parts) + 1)
        case dict():
            if value.keys() == {_REF}:
                stored, size = _children(value[_REF], blobs)
                return {_REF: [stored]}, size + len('{"$ref":[]}')
            fields = {name: _split(part, blobs) for name, part in value.items()}
            sizes = sum(len(orjson.dumps(name)) + 2 + size for name, (_, size) in fields.items())
            return {name: part for name, (part, _) in fields.items()}, max(2, sizes + 1)
        case _:
            return value, len(orjson.dumps(value))


def join(value: Any, blobs: Mapping[str, bytes]) -> Any:
    """The value that `split` made this stored form of. Raises `BadBlob`."""
    match value:
        case list():
            return [join(part, blobs) for part in value]
        case dict():
            if value.keys() != {_REF}:
                return {name: join(part, blobs) for name, part in value.items()}
            inner = value[_REF]
            if isinstance(inner, list) and len(inner) == 1:
                return {_REF: join(inner[0], blobs)}
            if isinstance(inner, str) and inner.startswith(_HASH):
                return join(_fetched(BLOB + inner.removeprefix(_HASH), blobs), blobs)
            raise BadBlob(f"{value!r} is no reference to a value")
        case _:
            return value


def _fetched(key: str, blobs: Mapping[str, bytes]) -> Any:
    data = blobs.get(key)
    if data is None:
        raise BadBlob(f"the value {key!r} is missing")
    if blob_key(data) != key:
        raise BadBlob(f"the bytes of the value {key!r} do not match its hash")
    return orjson.loads(data)
