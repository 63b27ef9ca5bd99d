"""The snapshot of a state, as the checkpoint keeps it: what a run goes on from, with the events after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ..errors import BadSnapshot
from .blobs import BadBlob, join, split
from .reducer import empty_state

__all__ = ["SNAPSHOT", "SNAPSHOT_VERSION", "StoredState", "decode_snapshot", "encode_snapshot"]

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
