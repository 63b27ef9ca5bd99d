"""The snapshot of a state, as the checkpoint keeps it: what a run goes on from, with the events after it.

Large values of a state, out of line: stored once by their content, however many snapshots have them.

In the place of a large value stands `{"$ref": "sha256:HEX"}`. An object of the user's that looks like that is
`{"$ref": [...]}` in the stored form, so that nothing is taken for a reference that is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ..errors import BadSnapshot
from .reducer import empty_state

__all__ = [
    "BLOB",
    "LARGE",
    "SNAPSHOT",
    "SNAPSHOT_VERSION",
    "BadBlob",
    "StoredState",
    "blob_key",
    "decode_snapshot",
    "encode_snapshot",
    "join",
    "split",
]

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


SNAPSHOT: Final = "#state"
"""The key of the snapshot in the checkpoint."""

SNAPSHOT_VERSION: Final = 1
"""The latest version of the form that this code reads, and the one that it writes."""

_NO_BLOBS: Final[Mapping[str, bytes]] = {}


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state as JSON, whose it is, and the number of the last event in it."""

    number: int
    agent: str
    state: dict[str, Any]


def encode_snapshot(state: dict[str, Any], number: int, agent: str, blobs: dict[str, bytes] | None = None) -> bytes:
    """A state as its snapshot. blobs: takes its large values, by the key under which they are to be stored in the same
    act; without it, they stay in the snapshot.
    """
    return orjson.dumps({"v": SNAPSHOT_VERSION, "n": number, "agent": agent, "state": split(state, blobs)})


def decode_snapshot(task_id: str, data: bytes, blobs: Mapping[str, bytes] = _NO_BLOBS) -> StoredState:
    """A state from its snapshot. blobs: the values that are out of line, by key (`History.saved` has them).

    Raises `BadSnapshot`, naming the task, for one that is broken, or of a later version.
    """
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadSnapshot(task_id, f"it is not JSON: {error}") from None
    version = found.get("v") if isinstance(found, dict) else None
    if not isinstance(version, int) or version < 1:
        raise BadSnapshot(task_id, "it is no snapshot: it has no version")
    if version > SNAPSHOT_VERSION:
        raise BadSnapshot(
            task_id,
            f"it has version {version}, and this version of perdure reads up to {SNAPSHOT_VERSION}: "
            "run the task with the version that wrote it, or a later one",
        )
    match found:
        case {"n": int(number), "agent": str(agent), "state": dict(stored)} if number >= 0:
            pass
        case _:
            raise BadSnapshot(task_id, "it has no number, agent or state")
    try:
        state = join(stored, blobs)
    except BadBlob as error:
        raise BadSnapshot(task_id, str(error)) from None
    for name, default in empty_state().items():
        known = state.setdefault(name, default)
        if isinstance(default, list | dict) and type(known) is not type(default):
            raise BadSnapshot(task_id, f"its {name} is no {'list' if isinstance(default, list) else 'object'}")
    return StoredState(number, agent, state)
