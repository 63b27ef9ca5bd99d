"""Items that another program wrote into the keys of Perdure, and the list where they are kept.

Whatever a script or a collection returns is bytes, and any client of the server may have written them. `split` decodes
them into good items and bad ones, and `set_aside` moves the bad ones out of the way, so that the next reader does not
find them again.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from .durations import iso_time
from .errors import Refused
from .keys import Partition, SessionPartition
from .transport import Gateway, pairs, queue_script

__all__ = [
    "JUNK_ENTRIES",
    "JUNK_TTL",
    "Items",
    "JunkItem",
    "read_junk",
    "report_once",
    "set_aside",
    "shown_bytes",
    "split",
]

_SET_ASIDE = queue_script("set_aside")
_logger = logging.getLogger(__name__)

JUNK_ENTRIES: Final = 1000
"""Most entries of the junk of a partition; the oldest make room."""

JUNK_TTL: Final = 30 * 86_400.0
"""Seconds for which the junk is kept after its last entry."""

_KEPT: Final = 4096
"""Most bytes that an entry keeps of an item, and of its content."""

_SHOWN: Final = 80
"""Most bytes of an item in a text."""


_MOST_REPORTED: Final = 1000
_reported: set[str] = set()


class Items(NamedTuple):
    """Items that were read: `good` ones decoded, `bad` ones as they are."""

    good: list[str]
    bad: list[bytes]


def split(found: Iterable[bytes], is_valid: Callable[[str], bool] = bool) -> Items:
    """Decode items. Bad ones are not UTF-8 or not valid; by default an empty text is not."""
    items = Items([], [])
    for item in found:
        try:
            text = item.decode()
        except UnicodeDecodeError:
            items.bad.append(item)
            continue
        if is_valid(text):
            items.good.append(text)
        else:
            items.bad.append(item)
    return items


def shown_bytes(item: bytes, limit: int = _SHOWN) -> str:
    """Return the start of an item as printable ASCII."""
    return repr(item[:limit])[1:] + (f" ({len(item)} bytes)" if len(item) > limit else "")


def report_once(text: str) -> None:
    """Log a warning once per process. Only so many texts are kept; further ones are not logged."""
    if text not in _reported and len(_reported) < _MOST_REPORTED:
        _reported.add(text)
        _logger.warning("%s", text)


async def set_aside(
    gateway: Gateway,
    partition: Partition | SessionPartition,
    key: str,
    kind: Literal["zset", "hash", "stream"],
    items: Sequence[bytes],
) -> int:
    """Move bad items of a key to the junk of its partition, and warn. Return how many were moved now."""
    if not items:
        return 0
    args = (kind, JUNK_ENTRIES, round(JUNK_TTL * 1000), _KEPT, *items)
    moved: int = await gateway.run(_SET_ASIDE, [key, partition.junk], args)
    if moved:
        shown = ", ".join(map(shown_bytes, items[:3])) + (", ..." if len(items) > 3 else "")
        _logger.warning(
            "moved %d items of %s to %s, which no part of Perdure wrote: %s", moved, key, partition.junk, shown
        )
    return moved


@dataclass(frozen=True, slots=True)
class JunkItem:
    """An entry of the junk: an item that was moved out of a key.

    Attributes:
        at: Milliseconds of Redis' clock at which it was moved.
        queue: None for an item of the sessions.
        key: Key that it was in.
        item: Member, field or entry id; the first 4,096 bytes.
        content: Value of the field, or fields of the entry; the first 4,096 bytes.
        size: Bytes of item and content.
    """

    at: int
    queue: str | None
    partition: int
    key: bytes
    item: bytes
    content: bytes
    size: int

    @property
    def reason(self) -> str:
        """Why no part of Perdure can have written the item."""
        if not self.item:
            return "it is empty"
        try:
            self.item.decode()
        except UnicodeDecodeError:
            return "it is not UTF-8"
        kind = self.key.rpartition(b":")[2]
        return _REASONS.get((self.queue is None, kind), "it is nothing that Perdure stores in this key")

    def summary(self) -> dict[str, Any]:
        """Return the item as plain data: printable ASCII, where other bytes are escaped."""
        return {
            "at": iso_time(self.at),
            "queue": self.queue,
            "partition": self.partition,
            "key": shown_bytes(self.key, _KEPT),
            "item": shown_bytes(self.item, _KEPT),
            "content": shown_bytes(self.content, _KEPT),
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
"""By whether the key belongs to the sessions, and the end of its name."""


async def read_junk(
    gateway: Gateway, partitions: Sequence[Partition | SessionPartition], limit: int
) -> tuple[list[JunkItem], list[str]]:
    """Return the junk of the partitions, the newest first, at most `limit` items; and the keys that cannot be read."""
    found: list[JunkItem] = []
    problems: list[str] = []
    for start in range(0, len(partitions), _TOGETHER):
        some = partitions[start : start + _TOGETHER]
        commands = [("XREVRANGE", partition.junk, "+", "-", "COUNT", limit) for partition in some]
        for partition, reply in zip(some, await gateway.pipeline_each(commands), strict=True):
            if isinstance(reply, Refused):
                problems.append(f"could not read {partition.junk}: {reply}")
            else:
                found += (_junk_item(partition, entry, pairs(fields)) for entry, fields in reply)
        found = heapq.nlargest(limit, found, key=lambda item: item.at)
    return found, problems


_TOGETHER: Final = 16
"""Partitions that are read in one round trip."""


def _junk_item(partition: Partition | SessionPartition, entry: bytes, fields: Mapping[bytes, bytes]) -> JunkItem:
    item, content = fields.get(b"item", b""), fields.get(b"content", b"")
    size = fields.get(b"bytes", b"")
    return JunkItem(
        at=int(entry.partition(b"-")[0]),
        queue=partition.queue if isinstance(partition, Partition) else None,
        partition=partition.index,
        key=fields.get(b"key", b""),
        item=item,
        content=content,
        size=int(size) if size.isdigit() and len(size) < _DIGITS else len(item) + len(content),
    )


_DIGITS: Final = 16
"""Digits from which a size is no size."""
