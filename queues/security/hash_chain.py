"""Hash chain over the events of a task, whose head is stored encrypted beside the counters that it confirms.

Each event is encrypted by itself, bound to its number and type. That alone does not show that events at the end of a
log, or a record of a step, are missing, nor that an older event with the same number was put back. So where there is a
key, each write stores a head with its entries, in the same act:

    [entries, records, start, base, snapshot, last]

    entries    number of the last entry
    records    number of the recorded steps; null if there are too many to count
    start      link before the first event of the log
    base       link before the last event that has the whole state: the next one shortens the log to it
    snapshot   link of the last event in the snapshot of an agent's state
    last       link of the last event

A link is the number of an event and a digest: BLAKE2b (RFC 7693) with 16 bytes of the digest of the link before, the
number, the type and the data of the event as it was before its encryption. An event that is sent again after its
encryption, or encrypted again, has the same link.

A run compares the head with the counters and with the records of its steps, and an agent the events after its snapshot.
Entries without a number, which scripts write, are not part of the chain. An older copy of all keys of a task has the
head that belongs to it, and is not found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from ..errors import ChangedCheckpoint
from ..keys import SNAPSHOT
from .encryption import HEAD, TaskCipher

_SIZE: Final = 16

_MOST_NAMES: Final = 5_000
"""Steps up to which a run counts the records: it knows the names of those that it counts."""


class ChainLink(NamedTuple):
    """A link of the chain: the number of an event, and the digest of the chain up to it."""

    number: int
    digest: bytes

    def follow(self, number: int, event_type: bytes, data: bytes) -> ChainLink:
        """Return the link of the next event. data: its JSON."""
        return ChainLink(number, event_digest(self.digest, number, event_type, data))


def event_digest(before: bytes, number: int, event_type: bytes, data: bytes) -> bytes:
    """Return the digest of the chain up to an event."""
    found = blake2b(before, digest_size=_SIZE)
    found.update(b"%d %d %b " % (number, len(event_type), event_type))
    found.update(data)
    return found.digest()


START: Final = ChainLink(0, bytes(_SIZE))
"""The link before the first event of a task."""


class ChainLinks(NamedTuple):
    """Links of a head. See the module."""

    start: ChainLink = START
    base: ChainLink | None = None
    snapshot: ChainLink | None = None
    last: ChainLink = START

    def encode(self) -> bytes:
        """Return the links as in the stored head."""
        return orjson.dumps([None if link is None else [link[0], link[1].hex()] for link in self])[1:-1]


ChainHead: TypeAlias = tuple[int | None, bytes]
"""A head but for the number of the last entry: number of the recorded steps, and the encoded links."""


def open_head(cipher: TaskCipher, stored: bytes) -> tuple[int, int | None, ChainLinks]:
    """Return the number of the last entry, that of the recorded steps, and the links. Raises `DecryptionError`."""
    entries, records, *links = orjson.loads(cipher.decrypt(HEAD, stored))
    start, base, snapshot, last = (None if one is None else ChainLink(one[0], bytes.fromhex(one[1])) for one in links)
    return entries, records, ChainLinks(start or START, base, snapshot, last or START)


class HashChain:
    """The chain of a task that has a key, up to what was put so far."""

    __slots__ = ("_encoded", "_names", "cipher", "links")

    def __init__(self, cipher: TaskCipher, links: ChainLinks, names: Iterable[str] | None) -> None:
        """names: of the recorded steps; None if they are not counted."""
        self.cipher = cipher
        self.links = links
        self._encoded = links.encode()
        self._names = None if names is None else set(names)

    def add(self, entries: Iterable[Sequence[Any]]) -> ChainHead:
        """Return the head after these entries of a checkpoint, which are not encrypted yet."""
        names = self._names
        for entry in entries:
            kind = entry[0]
            if kind in ("done", "mark"):
                if names is not None:
                    names.add(entry[1])
            elif kind == "drop":
                if names is not None:
                    names.discard(entry[1])
            elif kind in ("event", "base"):
                start, base, snapshot, last = self.links
                if kind == "base":
                    start, base = base or start, last
                self._set(ChainLinks(start, base, snapshot, last.follow(int(entry[2]), entry[1].encode(), entry[3])))
            elif kind == "saved" and entry[1] == SNAPSHOT:
                self._set(self.links._replace(snapshot=self.links.last))
        if names is None:
            return None, self._encoded
        if len(names) > _MOST_NAMES:
            self._names = None
        return len(names), self._encoded

    def seal(self, head: ChainHead, entries: int) -> bytes:
        """Return a head of this chain as it is stored. entries: number of the last entry."""
        records, links = head
        if records is None:
            return self.cipher.encrypt(HEAD, b"[%d,null,%b]" % (entries, links))
        return self.cipher.encrypt(HEAD, b"[%d,%d,%b]" % (entries, records, links))

    def _set(self, links: ChainLinks) -> None:
        self.links, self._encoded = links, links.encode()

    def begin_after(self, number: int) -> None:
        """Let the chain begin after the event with this number."""
        link = ChainLink(number, START.digest)
        self._set(ChainLinks(start=link, last=link))

    def end_at(self, number: int) -> ChainHead:
        """Return the head if the last event has this number: events before it are missing."""
        links = self.links._replace(last=self.links.last._replace(number=number))
        return self.add(())[0], links.encode()

    def copy(self) -> HashChain:
        """Return a chain with the same head, which does not change with this one."""
        return HashChain(self.cipher, self.links, self._names)

    def go_back(self, before: HashChain) -> None:
        """Forget what was added after `before` was copied."""
        self.links, self._encoded, self._names = before.links, before._encoded, before._names

    def without(self, steps: Iterable[str]) -> ChainHead:
        """Return the head when the records of these steps are gone."""
        names = self._names
        return None if names is None else len(names.difference(steps)), self._encoded


def check_events(
    task_id: str, links: ChainLinks, snapshot: int | None, events: Iterable[tuple[int | None, str, bytes]]
) -> None:
    """Check the events after a snapshot, or after the start of the chain, against the chain.

    Args:
        snapshot: Number of the last event in the snapshot; None without one.
        events: Numbers, types and data (JSON) of the events after it, in order.

    Raises `ChangedCheckpoint`.
    """
    link = links.snapshot or links.start
    if snapshot is None and links.snapshot is not None:
        raise ChangedCheckpoint(task_id, f"its snapshot after event {link.number} is missing")
    if snapshot is not None and (snapshot > link.number if links.snapshot is None else snapshot != link.number):
        raise ChangedCheckpoint(task_id, f"its snapshot is of event {snapshot}, and one of {link.number} was written")
    number = link.number if snapshot is None else snapshot  # before the link, if there was no key when it was written
    digest = link.digest
    for found, event_type, content in events:
        number += 1
        if found != number:
            break
        if number > link.number:
            digest = event_digest(digest, number, event_type.encode(), content)
    else:
        if number == links.last.number and digest == links.last.digest:
            return
        if number == links.last.number:
            which = f"an event from {link.number + 1} to {number} is not the one that was written"
            raise ChangedCheckpoint(task_id, which)
        number += 1
    raise ChangedCheckpoint(task_id, f"event {number} is missing from its log")


class LogCheck:
    """Check of a whole log against a head that was read before it."""

    def __init__(self, task_id: str, links: ChainLinks) -> None:
        self._task_id, self._links = task_id, links
        self._link: ChainLink | None = None

    def add(self, number: int, event_type: str, data: bytes) -> None:
        """Add the next event. Those before the start of the chain, or logged after the head was read, do not count."""
        start = self._links.start
        if number <= start.number or number > self._links.last.number:
            return
        self._link = self._link or start
        if number != self._link.number + 1:
            raise ChangedCheckpoint(self._task_id, f"event {number} follows event {self._link.number} in its log")
        self._link = self._link.follow(number, event_type.encode(), data)

    def finish(self) -> None:
        """Raise `ChangedCheckpoint` if the events are not those of the head."""
        last, link = self._links.last, self._link or self._links.start
        if link.number != last.number:
            raise ChangedCheckpoint(self._task_id, f"event {link.number + 1} is missing from its log")
        if link != last:
            raise ChangedCheckpoint(self._task_id, f"an event up to {last.number} is not the one that was written")


def checked_chain(
    cipher: TaskCipher,
    stored: bytes | None,
    *,
    entries: int,
    events: int,
    names: Collection[str] | None,
) -> HashChain | None:
    """Return the chain of a task whose head agrees with what is stored beside it; None without a key.

    A task that was enqueued before there was a key has no head: its chain starts with its next event, unless encryption
    is required.

    Args:
        stored: The head as it is stored.
        entries, events: The counters.
        names: Of the recorded steps; None if not all were read.

    Raises:
        ChangedCheckpoint: They do not agree.
        DecryptionError: The head is of another key, or was changed.
    """
    task_id = cipher.task_id
    if stored is None:
        if not cipher.encrypts:
            return None
        if entries and not cipher.accepts_plain:
            raise ChangedCheckpoint(task_id, f"it has {entries} entries, and the head of their hash chain is missing")
        link = ChainLink(events, START.digest)
        return HashChain(cipher, ChainLinks(start=link, last=link), names)
    known_entries, recorded, links = open_head(cipher, stored)
    if known_entries != entries:
        raise ChangedCheckpoint(task_id, f"its last entry is {known_entries}, and the counter {entries}")
    if links.last.number != events:
        raise ChangedCheckpoint(task_id, f"its last event is {links.last.number}, and the counter {events}")
    records = None if names is None else len(names)
    if None not in (records, recorded) and records != recorded:
        raise ChangedCheckpoint(task_id, f"the records of its steps are {records}, and {recorded} were written")
    return HashChain(cipher, links, names)
