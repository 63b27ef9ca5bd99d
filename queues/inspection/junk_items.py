"""Items that workers have moved out of the keys of Perdure, for people."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import Refused
from ..junk import shown_bytes
from ..keys import Namespace, Partition, SessionPartition
from ..transport.gateway import Gateway
from ..transport.scripts import pairs
from ..wording import iso_time

_SHOWN: Final = 4096
"""Most bytes of a part of an item in plain data."""

_TOGETHER: Final = 16
"""Lists that are read in one round trip."""

_DIGITS: Final = 16
"""Digits from which a stored size cannot be right."""


@dataclass(frozen=True, slots=True)
class JunkItem:
    """An entry of the junk: an item that was moved out of a key.

    Attributes:
        at: Milliseconds of Redis' clock at which it was moved.
        queue, partition: None for an item of the sessions, or of the whole namespace.
        key: Key that it was in.
        item: Member, field or entry id; the first 4,096 bytes.
        content: Value of the field, or fields of the entry; the first 4,096 bytes.
        size: Bytes of item and content.
    """

    at: int
    queue: str | None
    partition: int | None
    key: bytes
    item: bytes
    content: bytes
    size: int

    @property
    def reason(self) -> str:
        """Return the sign that another program wrote the item."""
        if not self.item:
            return "it is empty"
        try:
            self.item.decode()
        except UnicodeDecodeError:
            return "it is not UTF-8"
        if self.content.startswith(b"a value of type "):
            return "the key had another type"
        kind = self.key.rpartition(b":")[2]
        return _REASONS.get((self.queue is None, kind), "it is nothing that Perdure stores in this key")

    def summary(self) -> dict[str, Any]:
        """Return the item as plain data: printable ASCII, where other bytes are escaped."""
        return {
            "at": iso_time(self.at),
            "queue": self.queue,
            "partition": self.partition,
            "key": shown_bytes(self.key, _SHOWN),
            "item": shown_bytes(self.item, _SHOWN),
            "content": shown_bytes(self.content, _SHOWN),
            "bytes": self.size,
            "reason": self.reason,
        }


_REASONS: Final = {
    (False, b"due"): "it is not the id of a scheduled task",
    (False, b"timeline"): "it is not the id of a task",
    (False, b"dead"): "it is a dead letter of no task",
    (True, b"due"): "it is not the digest of a session",
    (True, b"timeline"): "it is not the digest of a session",
    (True, b"forgotten"): "it names no session and no turn",
}
"""Reasons by the kind of key: whether it belongs to no queue, and the end of its name."""


async def read_junk(
    gateway: Gateway, places: Sequence[Partition | SessionPartition | Namespace], limit: int
) -> tuple[list[JunkItem], list[str]]:
    """Return the junk of some places, the newest first, at most `limit` items; and the lists that cannot be read."""
    found: list[JunkItem] = []
    problems: list[str] = []
    for start in range(0, len(places), _TOGETHER):
        some = places[start : start + _TOGETHER]
        commands = [("XREVRANGE", place.junk, "+", "-", "COUNT", limit) for place in some]
        for place, reply in zip(some, await gateway.pipeline_each(commands), strict=True):
            if isinstance(reply, Refused):
                problems.append(f"could not read {place.junk}: {reply}")
            else:
                found += (_junk_item(place, entry, pairs(fields)) for entry, fields in reply)
        found = heapq.nlargest(limit, found, key=lambda item: item.at)
    return found, problems


def _junk_item(
    place: Partition | SessionPartition | Namespace, entry: bytes, fields: Mapping[bytes, bytes]
) -> JunkItem:
    item, content, size = (fields.get(name, b"") for name in (b"item", b"content", b"bytes"))
    return JunkItem(
        at=int(entry.partition(b"-")[0]),
        queue=place.queue if isinstance(place, Partition) else None,
        partition=None if isinstance(place, Namespace) else place.index,
        key=fields.get(b"key", b""),
        item=item,
        content=content,
        size=int(size) if size.isdigit() and len(size) < _DIGITS else len(item) + len(content),
    )
