"""The form in which a thread of LangGraph is stored: one namespace of the key-value store per thread.

    c/NS/CHECKPOINT               a checkpoint without the values of its channels, and its metadata
    b/NS/CHANNEL/VERSION          the value of a channel as of a version
    w/NS/CHECKPOINT/TASK/r        the writes of a task of the graph to its channels
    w/NS/CHECKPOINT/TASK/INDEX    one of its special writes, such as an interrupt, which replaces a former one
    r/RUN                         mark that checkpoints of a run are in the thread

NS is the checkpoint namespace of a subgraph, empty for the graph itself. Plain values are kept in the checkpoint. All
other parts are encoded by LangGraph's serializer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import quote

import orjson
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    Checkpoint,
    CheckpointMetadata,
    PendingWrite,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

CHECKPOINTS: Final = "c/"
VALUES: Final = "b/"
WRITES: Final = "w/"
RUNS: Final = "r/"

_MAX_PART: Final = 120
"""Characters of a part of a key; a longer one is replaced by its digest."""

_PLAIN_TEXT: Final = 1000
"""Characters up to which a text is kept in the checkpoint, and not as a value of its own."""


def part(text: str) -> str:
    """Return a text as a part of a key, without a slash."""
    quoted = quote(text, safe=" !$&'()*+,:;=@|~")
    return quoted if len(quoted) <= _MAX_PART else "%" + hashlib.blake2b(text.encode(), digest_size=24).hexdigest()


def checkpoint_key(ns: str, checkpoint_id: str) -> str:
    return f"{CHECKPOINTS}{part(ns)}/{part(checkpoint_id)}"


def value_key(ns: str, channel: str, version: object) -> str:
    return f"{VALUES}{part(ns)}/{part(channel)}/{part(str(version))}"


def writes_prefix(ns: str, checkpoint_id: str) -> str:
    return f"{WRITES}{part(ns)}/{part(checkpoint_id)}/"


def pack(head: Any, parts: Iterable[bytes]) -> bytes:
    """Return JSON data and byte strings as one byte string."""
    listed = list(parts)
    return b"".join((orjson.dumps([head, [len(data) for data in listed]]), b"\n", *listed))


def unpack(data: bytes) -> tuple[Any, list[bytes]]:
    """Return what `pack` was given."""
    line, _, rest = data.partition(b"\n")
    head, sizes = orjson.loads(line)
    parts, start = [], 0
    for size in sizes:
        parts.append(rest[start : start + size])
        start += size
    return head, parts


def is_plain(value: object) -> bool:
    """Return whether a value is kept in the checkpoint."""
    return value is None or type(value) in (int, float, bool) or (type(value) is str and len(value) <= _PLAIN_TEXT)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as it is stored, without the values that have entries of their own."""

    ns: str
    parent: str | None
    checkpoint: Checkpoint
    metadata: CheckpointMetadata

    @classmethod
    def decode(cls, data: bytes, serde: SerializerProtocol) -> StoredCheckpoint:
        """Read what `encode` returned."""
        (ns, parent, kinds), parts = unpack(data)
        checkpoint, metadata = (serde.loads_typed(pair) for pair in zip(kinds, parts, strict=True))
        return cls(ns, parent, checkpoint, metadata)

    def encode(self, serde: SerializerProtocol) -> bytes:
        typed = [serde.dumps_typed(self.checkpoint), serde.dumps_typed(self.metadata)]
        return pack([self.ns, self.parent, [kind for kind, _ in typed]], (data for _, data in typed))

    @property
    def id(self) -> str:
        return str(self.checkpoint["id"])

    @property
    def value_keys(self) -> dict[str, str]:
        """Keys of the values that have entries of their own, by channel."""
        plain = self.checkpoint["channel_values"]
        versions = self.checkpoint["channel_versions"]
        return {name: value_key(self.ns, name, versions[name]) for name in versions if name not in plain}

    @property
    def delta_channels(self) -> set[str]:
        """Channels whose values are built from the writes of earlier checkpoints."""
        return set(self.metadata.get("counters_since_delta_snapshot", {}))


def encode_value(value: Any, serde: SerializerProtocol) -> bytes:
    kind, data = serde.dumps_typed(value)
    return pack(kind, (data,))


def decode_value(data: bytes, serde: SerializerProtocol) -> Any:
    kind, (encoded,) = unpack(data)
    return serde.loads_typed((kind, encoded))


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a task of the graph, its value encoded."""

    path: str
    task_id: str
    index: int
    channel: str
    kind: str
    data: bytes

    def pending(self, serde: SerializerProtocol) -> PendingWrite:
        return self.task_id, self.channel, serde.loads_typed((self.kind, self.data))


def encode_writes(
    prefix: str, writes: Sequence[tuple[str, Any]], task_id: str, path: str, serde: SerializerProtocol
) -> tuple[list[Write], dict[str, bytes]]:
    """Return the usual writes of a call, and the entries of its special ones by their keys."""
    usual: list[Write] = []
    special: dict[str, bytes] = {}
    for number, (channel, value) in enumerate(writes):
        index = WRITES_IDX_MAP.get(channel, number)
        write = Write(path, task_id, index, channel, *serde.dumps_typed(value))
        if index >= 0:
            usual.append(write)
        else:
            special[f"{prefix}{part(task_id)}/{index}"] = pack_writes([write])
    return usual, special


def usual_key(prefix: str, task_id: str) -> str:
    return f"{prefix}{part(task_id)}/r"


def pack_writes(writes: Iterable[Write]) -> bytes:
    listed = list(writes)
    heads = [(write.path, write.task_id, write.index, write.channel, write.kind) for write in listed]
    return pack(heads, (write.data for write in listed))


def unpack_writes(data: bytes) -> list[Write]:
    heads, parts = unpack(data)
    return [
        Write(path, task_id, index, channel, kind, encoded)
        for (path, task_id, index, channel, kind), encoded in zip(heads, parts, strict=True)
    ]


def in_order(entries: Iterable[bytes]) -> list[Write]:
    """Return the writes of a checkpoint in the order in which LangGraph applies them."""
    found = [write for data in entries for write in unpack_writes(data)]
    return sorted(found, key=lambda write: writes_sort_key(write.path, write.task_id, write.index))


def with_values(checkpoint: Checkpoint, values: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with further values of channels."""
    return cast("Checkpoint", {**checkpoint, "channel_values": {**checkpoint["channel_values"], **values}})
