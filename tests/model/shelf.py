"""The part of Redis that the model needs: hashes, streams with one group, sorted sets, and times to live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.model.later import Id, Moment, Value, text_of
from tests.model.picture import Group, Picture, Seen

__all__ = ["Pending", "Shelf", "Stream"]

Fields = tuple[tuple[bytes, Value], ...]


@dataclass
class Pending:
    """A pending delivery: its consumer, its delivery count, and the time of the last one."""

    owner: str
    count: int
    since: Moment


@dataclass
class Stream:
    """A stream, with its group once there is one.

    names: of the group's consumers; True: it exists, False: it does not, None: both are right (whether a read or claim
    without a message creates a consumer depends on the version of the server).
    """

    entries: list[tuple[Id, Fields]] = field(default_factory=list)
    last: Id = field(default_factory=lambda: Id(b"0-0"))
    grouped: bool = False
    delivered: Id = field(default_factory=lambda: Id(b"0-0"))
    pending: dict[bytes, Pending] = field(default_factory=dict)
    names: dict[str, bool | None] = field(default_factory=dict)

    def find(self, entry: bytes) -> Fields | None:
        return next((fields for one, fields in self.entries if one.known == entry), None)

    def remove(self, entry: bytes) -> bool:
        before = len(self.entries)
        self.entries = [one for one in self.entries if one[0].known != entry]
        return len(self.entries) < before

    def new(self) -> list[tuple[Id, Fields]]:
        """Return the entries that were never delivered."""
        return [one for one in self.entries if one[0].order > self.delivered.order]


class Shelf:
    """The expected keys and their content."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, Value]] = {}
        self.streams: dict[str, Stream] = {}
        self.sets: dict[str, dict[str, Value]] = {}
        self.strings: dict[str, Value] = {}
        self.deadlines: dict[str, Moment] = {}
        self.now = 0
        """Milliseconds of Redis' clock at the last comparison: what happens next happens at this time or later."""

    # -- operations of Redis

    def get(self, key: str, name: str) -> bytes | None:
        value = self.hashes.get(key, {}).get(name)
        return None if value is None else text_of(value)

    def put(self, key: str, fields: Mapping[str, Value | int | str]) -> None:
        self.hashes.setdefault(key, {}).update({name: _value(value) for name, value in fields.items()})

    def put_new(self, key: str, name: str, value: Value) -> None:
        self.hashes.setdefault(key, {}).setdefault(name, value)

    def drop(self, key: str, *names: str) -> None:
        for name in names:
            self.hashes.get(key, {}).pop(name, None)
        if not self.hashes.get(key, True):
            self.delete(key)

    def add(self, key: str, fields: Fields, most: int | None = None) -> Id:
        stream = self.streams.setdefault(key, Stream())
        stream.last = Id()
        stream.entries.append((stream.last, fields))
        if most is not None:
            stream.entries = stream.entries[-most:]
        return stream.last

    def add_number(self, key: str, fields: Fields) -> int:
        """Add an entry whose id is the next number. Return the number."""
        stream = self.streams.setdefault(key, Stream())
        number = int(text_of(stream.last).partition(b"-")[0]) + 1
        stream.last = Id(b"%d-0" % number)
        stream.entries.append((stream.last, fields))
        return number

    def stream(self, key: str) -> Stream:
        """Return the stream, or an empty one that is not stored if the stream is missing."""
        return self.streams.get(key, Stream())

    def set_score(self, key: str, member: str, score: Value) -> None:
        self.sets.setdefault(key, {})[member] = score

    def drop_score(self, key: str, *members: str) -> None:
        for member in members:
            self.sets.get(key, {}).pop(member, None)
        if not self.sets.get(key, True):
            self.delete(key)

    def exists(self, key: str) -> bool:
        return any(key in shelf for shelf in (self.hashes, self.streams, self.sets, self.strings))

    def delete(self, *keys: str) -> None:
        for key in keys:
            for shelf in (self.hashes, self.streams, self.sets, self.strings, self.deadlines):
                shelf.pop(key, None)

    def expire(self, ms: int, *keys: str) -> None:
        for key in keys:
            if self.exists(key):
                self.deadlines[key] = Moment(plus=ms, loose=True)

    def persist(self, *keys: str) -> None:
        for key in keys:
            self.deadlines.pop(key, None)

    # -- comparing

    def compare(self, picture: Picture) -> list[str]:
        """Return every difference to the picture. A value that Redis chooses is taken over, if it is possible."""
        found = list(self._differences(picture))
        self.now = picture.at
        return found

    def _differences(self, picture: Picture) -> Iterator[str]:
        low, high = self.now, picture.at
        expected = {*self.hashes, *self.streams, *self.sets, *self.strings}
        yield from (f"{key} is missing" for key in sorted(expected - picture.keys.keys()))
        yield from (f"{key} should not be there" for key in sorted(picture.keys.keys() - expected))
        # Streams first: the hashes contain their new ids as well.
        for key in sorted(expected & picture.keys.keys(), key=lambda key: (key not in self.streams, key)):
            seen = picture.keys[key]
            yield from (f"{key}: {what}" for what in self._deadline(key, seen, low, high))
            yield from (f"{key}: {what}" for what in self._content(key, seen, low, high))

    def _deadline(self, key: str, seen: Seen, low: int, high: int) -> Iterator[str]:
        deadline = self.deadlines.get(key)
        if (deadline is None) != (seen.deadline is None):
            yield "has a time to live" if deadline is None else "has no time to live"
        elif deadline is not None and not deadline.fits(str(seen.deadline).encode(), low, high):
            yield f"expires at {seen.deadline}, not {deadline}"

    def _content(self, key: str, seen: Seen, low: int, high: int) -> Iterator[str]:
        if key in self.strings:
            if not fits(self.strings[key], seen.content, low, high):
                yield f"{seen.content}, not {self.strings[key]!r}"
        elif key in self.streams:
            yield from _stream_differences(self.streams[key], seen, low, high)
        else:
            kept = self.hashes if key in self.hashes else self.sets
            yield from _field_differences(kept[key], seen.content, low, high)


def _value(value: Value | int | str) -> Value:
    return str(value).encode() if isinstance(value, (int, str)) else value


def fits(value: Value, seen: bytes, low: int, high: int) -> bool:
    return value == seen if isinstance(value, bytes) else value.fits(seen, low, high)


def _field_differences(kept: dict[str, Value], seen: dict[bytes, bytes], low: int, high: int) -> Iterator[str]:
    reported = {name.decode(): value for name, value in seen.items()}
    yield from (f"{name} is missing" for name in kept.keys() - reported.keys())
    yield from (f"{name} should not be there" for name in reported.keys() - kept.keys())
    for name in kept.keys() & reported.keys():
        if not fits(kept[name], reported[name], low, high):
            yield f"{name} is {reported[name]!r}, not {kept[name]!r}"


def _stream_differences(stream: Stream, seen: Seen, low: int, high: int) -> Iterator[str]:
    if len(stream.entries) != len(seen.content):
        yield f"{len(seen.content)} entries, not {len(stream.entries)}"
    for (entry, fields), (id_seen, flat) in zip(stream.entries, seen.content, strict=False):
        if not entry.fits(id_seen, low, high):
            yield f"entry {id_seen!r}, not {entry!r}"
        values = list(zip(flat[::2], flat[1::2], strict=True))
        same = len(values) == len(fields) and all(
            name == name_seen and fits(value, value_seen, low, high)
            for (name, value), (name_seen, value_seen) in zip(fields, values, strict=True)
        )
        if not same:
            yield f"entry {id_seen!r} holds {values}, not {fields}"
    if stream.grouped != (seen.group is not None):
        yield "has a group" if seen.group else "has no group"
    elif seen.group is not None:
        yield from _group_differences(stream, seen.group, low, high)


def _group_differences(stream: Stream, seen: Group, low: int, high: int) -> Iterator[str]:
    if not stream.delivered.fits(seen.delivered, low, high):
        yield f"delivered up to {seen.delivered!r}, not {stream.delivered!r}"
    yield from (f"{entry!r} should be pending" for entry in stream.pending.keys() - seen.pending.keys())
    yield from (f"{entry!r} should not be pending" for entry in seen.pending.keys() - stream.pending.keys())
    for entry in stream.pending.keys() & seen.pending.keys():
        held, (owner, count, since) = stream.pending[entry], seen.pending[entry]
        if (held.owner.encode(), held.count) != (owner, count):
            yield f"{entry!r} is {owner!r}'s at {count}, not {held.owner}'s at {held.count}"
        if not held.since.fits(str(since).encode(), low, high):
            yield f"{entry!r} was delivered at {since}, not {held.since}"
    yield from (f"no consumer {name}" for name, here in stream.names.items() if here is True and name not in seen.names)
    yield from (f"a consumer {name}" for name in seen.names if stream.names.get(name, False) is False)
