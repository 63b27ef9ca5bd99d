"""Form of the items of a task's streams, as scripts store them and readers decode them.

A task emits items into named streams (`ctx.emit`). Each is a Redis stream, `Partition.stream(task_id, name)`, with the
ids `1-0`, `2-0`, `3-0`, ... without gaps: the number of an item is the cursor of its readers, and a missing number
shows that the stream was trimmed. The field `streams` of the task's record has the names, see `stream_names`. Each
write publishes the last number on the channel that has the name of the stream's key.

Fields of an entry:

    t    milliseconds of Redis' clock
    u    unit that emitted it: the key of a step, or the prefix of a scope for the body of a function (`""`, `page-3/`)
    y    try of the unit, over all runs of the task; 0 for the body of a function
    n    position within the unit and its try, from 1
    d    JSON, encrypted as `item_field(...)`
    k    digest of the key, of a keyed item: it has neither y nor n, and an empty u. Of a notice, `resumed-N`: the
         run that logged event N resumed the work, and d is the text of that event for the user
    cut  of a mark, which has no d: `1` voids the items of its unit with a try of at most y that are before it, `all`
         each item before it (a fresh replay). No mark voids keyed items
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .keys import check_name

DEFAULT_STREAM: Final = "output"

STREAMS: Final = 16
"""Streams that a task may have."""

STREAM_ITEMS: Final = 10_000
"""Items that a stream keeps, about."""

MIN_STREAM_ITEMS: Final = 100
"""Items that a stream keeps however large they are."""

STREAM_BYTES: Final = 16 * 1024 * 1024
"""Bytes of the items that a stream keeps, about."""

ITEM_BYTES: Final = 65_536
"""Bytes of JSON of an item."""

_NOTICE: Final = "resumed-"
"""Beginning of the keys of notices; the digests of other keys are hexadecimal."""

CUT_UNIT: Final = b"1"
CUT_ALL: Final = b"all"


INTERNAL: Final = "~"
"""Begins the names of streams for people (call_records.py), which readers of the streams of a task do not get."""


class StoredItem(NamedTuple):
    """An entry of a stream.

    Attributes:
        number: the cursor, from 1.
        at: milliseconds since the epoch.
        unit, attempt, position: see the fields u, y and n above.
        data: JSON, maybe encrypted as `field`; empty for a mark.
        key: digest of the key of a keyed item, else "".
        cut: `CUT_UNIT` or `CUT_ALL` for a mark, else b"".
    """

    number: int
    at: int
    unit: str = ""
    attempt: int = 0
    position: int = 0
    data: bytes = b""
    key: str = ""
    cut: bytes = b""

    @property
    def is_notice(self) -> bool:
        """Whether it tells the user that the work was resumed."""
        return self.key.startswith(_NOTICE)

    def field(self, stream: str) -> str:
        """Return the kind as which the data of an item of this stream is encrypted."""
        if self.key:
            return keyed_field(stream, self.key)
        return item_field(stream, self.unit, self.attempt, self.position)


def decode_item(entry: bytes, fields: Sequence[bytes]) -> StoredItem:
    """Read an entry of a stream: its id, and its names and values in turn, as XRANGE returns them.

    Raises `ValueError` for one that no version has written.
    """
    found: Mapping[bytes, bytes] = dict(zip(fields[::2], fields[1::2], strict=True))
    number, _, rest = entry.partition(b"-")
    cut = found.get(b"cut", b"")
    if rest != b"0" or (not cut and b"d" not in found):
        raise ValueError(f"entry {entry!r} is no item of a stream")
    return StoredItem(
        number_of_id(number),
        number_of_id(found.get(b"t", b"0")),
        found.get(b"u", b"").decode(),
        number_of_id(found.get(b"y", b"0")),
        number_of_id(found.get(b"n", b"0")),
        found.get(b"d", b""),
        found.get(b"k", b"").decode(),
        cut,
    )


def number_of_id(value: bytes) -> int:
    """Return a number in an entry. Raises `ValueError`."""
    if not value.isdigit() or len(value) > 16:
        raise ValueError(f"number of a stream's entry must be at most 16 digits, got {value[:40]!r}")
    return int(value)


def entry_id(number: int) -> str:
    """Return the id of the entry with this number."""
    return f"{number}-0"


def stream_names(streams: bytes | None) -> list[str]:
    """Return the names of a task's streams from the field `streams` of its record, without those for people."""
    names = [] if streams is None else streams.decode("utf-8", "replace").split()
    return [name for name in names if not name.startswith(INTERNAL)]


def check_stream(name: object) -> str:
    """Return the name of a stream. Raises `ValueError` with the rule for any other."""
    return check_name("name of a stream", name)


def item_field(stream: str, unit: str, attempt: int, position: int) -> str:
    """Return the kind as which an item is encrypted: it cannot be decrypted at another place."""
    return f"stream:{stream}:{unit}:{attempt}:{position}"


def keyed_field(stream: str, key: str) -> str:
    """Return the kind as which a keyed item is encrypted. key: its digest."""
    return f"stream:{stream}:{key}"


def notice_key(event: int) -> str:
    """Return what the notice of a resume has as the digest of its key. event: number of the event `resumed`."""
    return f"{_NOTICE}{event}"


def item_place(stream: str, limit: int, unit: str, attempt: int, position: int) -> str:
    """Return the place of an item, as an entry of the checkpoint has it. limit: items that the stream keeps."""
    return f"{stream} {limit} {attempt} {position} {unit}"


def keyed_place(stream: str, limit: int, key: str) -> str:
    """Return the place of a keyed item. key: its digest."""
    return f"{stream} {limit} key {key}"


def mark_place(stream: str, unit: str, attempt: int) -> str:
    """Return the place of a mark that voids the items of a unit up to a try."""
    return f"{stream} {attempt} {unit}"


def stream_of_place(place: str) -> str:
    """Return the name of the stream in a place."""
    return place.partition(" ")[0]


def field_of_place(place: str) -> str:
    """Return the kind as which the item at a place is encrypted."""
    stream, _, attempt, rest = place.split(" ", 3)
    if attempt == "key":
        return keyed_field(stream, rest)
    position, _, unit = rest.partition(" ")
    return item_field(stream, unit, int(attempt), int(position))


def key_digest(key: str) -> str:
    """Return the digest by which the key of an item is stored."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
