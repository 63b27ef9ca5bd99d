"""Items that another program wrote into the keys of Perdure, and the list where they are kept.

Whatever a script or a collection returns is bytes, and any client of the server may have written them. `split` decodes
them into good items and bad ones, and `set_aside` moves the bad ones out of the way, so that the next reader does not
find them again. A key with a value of another type is the gateway's matter: `Gateway.set_keys_aside`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from .keys import JUNK_ENTRIES, JUNK_TTL_MS, Partition, SessionPartition, junk_keys
from .transport.gateway import Gateway
from .transport.scripts import queue_script
from .wording import listed

_SET_ASIDE = queue_script("set_aside")
_SET_KEY_ASIDE = queue_script("set_key_aside")
_logger = logging.getLogger(__name__)

JUNK_TTL: Final = JUNK_TTL_MS / 1000
"""Seconds for which the junk is kept after its last entry."""

_KEPT: Final = 4096
"""Most bytes that an entry keeps of an item, and of its content."""

_SHOWN: Final = 80
"""Most bytes of an item in a text."""


_DIGITS: Final = 14
"""Most digits of a count, which Lua writes exactly."""

_MAX_REPORTED: Final = 1000
_reported: set[str] = set()


_ENTRY_ID: Final = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")


def is_entry_id(stored: bytes) -> bool:
    """Return whether stored bytes are the id of a stream entry. A command with another one is refused."""
    return _ENTRY_ID.fullmatch(stored) is not None


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


def count_of(stored: bytes | None) -> int:
    """Return a stored count or time; 0 for anything else than 1 to 14 digits, as `inbox.lua` reads it."""
    return int(stored) if stored is not None and stored.isdigit() and len(stored) <= _DIGITS else 0


def shown_bytes(item: bytes, limit: int = _SHOWN) -> str:
    """Return the start of an item as printable ASCII."""
    return repr(item[:limit])[1:] + (f" ({len(item)} bytes)" if len(item) > limit else "")


def report_once(text: str) -> None:
    """Log a warning once per process. Only so many texts are kept; further ones are not logged."""
    if text not in _reported and len(_reported) < _MAX_REPORTED:
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
    args = (kind, JUNK_ENTRIES, JUNK_TTL_MS, _KEPT, *items)
    moved: int = await gateway.run(_SET_ASIDE, [key, partition.junk], args)
    if moved:
        shown = listed(map(shown_bytes, items), 3)
        _logger.warning(
            "moved %d items of %s to %s, which no part of Perdure wrote: %s", moved, key, partition.junk, shown
        )
    return moved


async def set_hash_aside(gateway: Gateway, key: str, field: str, value: bytes) -> bool:
    """Move a hash that another program wrote to the junk, and warn. Return whether it was moved now.

    field, value: what the caller has judged by (b"" if the field is missing): a hash with another value stays.
    """
    kept = junk_keys(key)
    args = ("hash", JUNK_ENTRIES, JUNK_TTL_MS, field, value)
    moved = bool(await gateway.run(_SET_KEY_ASIDE, [key, kept.value, kept.entries], args))
    if moved:
        _logger.warning(
            "moved %s, which no part of Perdure wrote (%s: %s), to %s", key, field, shown_bytes(value), kept.value
        )
    return moved
