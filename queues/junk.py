"""Items that another program wrote into the keys of Perdure, and the list where they are kept.

Whatever a script or a collection returns is bytes, and any client of the server may have written them. `split` decodes
them into good items and bad ones, and `set_aside` moves the bad ones out of the way, so that the next reader does not
find them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from .keys import Partition, SessionPartition
from .transport import Gateway, queue_script

__all__ = ["JUNK_ENTRIES", "JUNK_TTL", "Items", "report_once", "set_aside", "shown_bytes", "split"]

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
