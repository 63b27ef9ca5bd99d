"""Stored form of a state: the snapshot in the checkpoint, with large values stored apart.

A run restores its state from the snapshot and the events after it. A large value is stored once under the hash of its
content, however many snapshots contain it, and `{"$ref": "sha256:HEX"}` takes its place. A user's object of that shape
is stored as `{"$ref": [...]}`, so that it is never read as a reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ...errors import BadSnapshot
from .reducer import empty_state

SNAPSHOT_VERSION: Final = 1
"""Format version that this code writes, and the latest that it reads."""

BLOB: Final = "#blob:"
"""Prefix of the checkpoint keys of large values; the SHA-256 of their bytes follows, in hexadecimal."""

LARGE: Final = 16 * 1024
"""Size of a value's JSON in bytes above which it is stored apart."""

_REF: Final = "$ref"
_REF_NAME: Final = b'"$ref":'

_HASH: Final = "sha256:"

_REFERENCE: Final = len('{"$ref":"sha256:"}') + 64

_NO_BLOBS: Final[Mapping[str, bytes]] = {}


class BadBlob(ValueError):
    """A large value that is missing or does not match its hash."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """State as JSON, the name of its agent, and the number of the last event in it."""

    number: int
    agent: str
    state: dict[str, Any]


def encode_snapshot(state: dict[str, Any], number: int, agent: str, blobs: dict[str, bytes] | None = None) -> bytes:
    """Return the snapshot of a state.

    Args:
        blobs: Receives large values by key, to be stored in the same act; without it, they stay in the snapshot.
    """
    return orjson.dumps({"v": SNAPSHOT_VERSION, "n": number, "agent": agent, "state": split(state, blobs)})


def snapshot_number(task_id: str, data: bytes) -> int:
    """Return the number of the last event in a snapshot. Raises `BadSnapshot`."""
    try:
        return int(orjson.loads(data)["n"])
    except (ValueError, LookupError, TypeError) as error:
        raise BadSnapshot(task_id, f"it has no number: {error}") from None


def decode_snapshot(
    task_id: str, data: bytes, blobs: Mapping[str, bytes] = _NO_BLOBS, *, owner: str | None = None
) -> StoredState:
    """Return the state of a snapshot.

    Args:
        blobs: large values by key (`History.saved` has them).
        owner: name of the agent that the state must belong to; None for any.

    Raises:
        BadSnapshot: the snapshot is broken, of a later version, or of another agent.
    """
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadSnapshot(task_id, f"it is not JSON: {error}") from None
    version = found.get("v") if isinstance(found, dict) else None
    if not isinstance(version, int) or version < 1:
        raise BadSnapshot(task_id, "it has no version")
    if version > SNAPSHOT_VERSION:
        raise BadSnapshot(
            task_id,
            f"it has version {version}; this version of Perdure reads up to {SNAPSHOT_VERSION}: "
            "run the task with the version that wrote it, or a later one",
        )
    match found:
        case {"n": int(number), "agent": str(agent), "state": dict(stored)} if number >= 0:
            pass
        case _:
            raise BadSnapshot(task_id, "it has no number, agent or state")
    if owner not in (None, agent):
        raise BadSnapshot(task_id, f"it belongs to agent {agent!r}, not to {owner!r}")
    try:
        state = join(stored, blobs)
    except BadBlob as error:
        raise BadSnapshot(task_id, str(error)) from None
    for name, default in empty_state().items():
        known = state.setdefault(name, default)
        if isinstance(default, list | dict) and type(known) is not type(default):
            raise BadSnapshot(task_id, f"its {name} must be {'a list' if isinstance(default, list) else 'an object'}")
    return StoredState(number, agent, state)


def blob_key(data: bytes) -> str:
    """Return the checkpoint key of a value's JSON."""
    return BLOB + hashlib.sha256(data).hexdigest()


def split(value: Any, blobs: dict[str, bytes] | None) -> Any:
    """Return the stored form of a value.

    Inner values are moved out first, so a large object of small parts is stored again only if the object itself is
    large. The outermost value always stays.

    Args:
        blobs: Receives the values that are stored apart, by key; None leaves all of them in place.
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


def _children(value: Any, blobs: dict[str, bytes] | None) -> tuple[Any, int]:
    """Return a value with its parts in stored form, and the size of its JSON in bytes.

    A small value without references has its stored form: it is looked at as a whole.
    """
    data = orjson.dumps(value)
    if len(data) <= LARGE and _REF_NAME not in data:
        return value, len(data)
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
            return value, len(data)


def join(value: Any, blobs: Mapping[str, bytes]) -> Any:
    """Return the value of a stored form; the inverse of `split`. Raises `BadBlob`."""
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
                return join(_fetch_blob(BLOB + inner.removeprefix(_HASH), blobs), blobs)
            raise BadBlob(f"{value!r} is not a reference to a value")
        case _:
            return value


def _fetch_blob(key: str, blobs: Mapping[str, bytes]) -> Any:
    data = blobs.get(key)
    if data is None:
        raise BadBlob(f"the value {key!r} is missing")
    if blob_key(data) != key:
        raise BadBlob(f"the bytes of the value {key!r} do not match its hash")
    return orjson.loads(data)
