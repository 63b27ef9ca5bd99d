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
from typing import Any, Final, NamedTuple

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


class ChainHead(NamedTuple):
    """Head of a chain, but for the number of the last entry. See the module."""

    records: int | None = 0
    start: ChainLink = START
    base: ChainLink | None = None
    snapshot: ChainLink | None = None
    last: ChainLink = START

    def sealed(self, cipher: TaskCipher, entries: int) -> bytes:
        """Return the head as it is stored. entries: number of the last entry."""
        links = [None if link is None else [link[0], link[1].hex()] for link in self[1:]]
        return cipher.encrypt(HEAD, orjson.dumps([entries, self.records, *links]))


def open_head(cipher: TaskCipher, stored: bytes) -> tuple[int, ChainHead]:
    """Return the number of the last entry, and the head. Raises `DecryptionError`."""
    entries, records, *links = orjson.loads(cipher.decrypt(HEAD, stored))
    start, base, snapshot, last = (None if one is None else ChainLink(one[0], bytes.fromhex(one[1])) for one in links)
    return entries, ChainHead(records, start or START, base, snapshot, last or START)


class HashChain:
    """The chain of a task that has a key: its head after what was put so far."""

    __slots__ = ("_names", "cipher", "head")

    def __init__(self, cipher: TaskCipher, head: ChainHead, names: Iterable[str] | None) -> None:
        """names: of the recorded steps; None if they are not counted."""
        self.cipher = cipher
        self.head = head
        self._names = None if names is None else set(names)

    def add(self, entries: Iterable[Sequence[Any]]) -> ChainHead:
        """Return the head after these entries of a checkpoint, which are not encrypted yet."""
        _, start, base, snapshot, last = self.head
        names = self._names
        for entry in entries:
            kind = entry[0]
            if kind in ("done", "mark"):
                if names is not None:
                    names.add(entry[1])
            elif kind in ("event", "base"):
                if kind == "base":
                    start, base = base or start, last
                last = last.follow(int(entry[2]), entry[1].encode(), entry[3])
            elif kind == "drop":
                if names is not None:
                    names.discard(entry[1])
            elif kind == "saved" and entry[1] == SNAPSHOT:
                snapshot = last
        if names is not None and len(names) > _MOST_NAMES:
            self._names = names = None
        self.head = ChainHead(None if names is None else len(names), start, base, snapshot, last)
        return self.head

    def begin_after(self, number: int) -> None:
        """Let the chain begin after the event with this number."""
        link = ChainLink(number, START.digest)
        self.head = self.head._replace(start=link, last=link)

    def copy(self) -> HashChain:
        """Return a chain with the same head, which does not change with this one."""
        return HashChain(self.cipher, self.head, self._names)

    def without(self, steps: Iterable[str]) -> ChainHead:
        """Return the head when the records of these steps are gone."""
        names = self._names
        return self.head._replace(records=None if names is None else len(names.difference(steps)))


def check_events(
    task_id: str, head: ChainHead, snapshot: int | None, events: Iterable[tuple[int | None, str, bytes]]
) -> None:
    """Check the events after a snapshot, or after the start of the chain, against the head.

    Args:
        snapshot: Number of the last event in the snapshot; None without one.
        events: Numbers, types and data (JSON) of the events after it, in order.

    Raises `ChangedCheckpoint`.
    """
    link = head.snapshot or head.start
    if snapshot is None and head.snapshot is not None:
        raise ChangedCheckpoint(task_id, f"its snapshot after event {link.number} is missing")
    if snapshot is not None and (snapshot > link.number if head.snapshot is None else snapshot != link.number):
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
        if number == head.last.number and digest == head.last.digest:
            return
        if number == head.last.number:
            which = f"an event from {link.number + 1} to {number} is not the one that was written"
            raise ChangedCheckpoint(task_id, which)
        number += 1
    raise ChangedCheckpoint(task_id, f"event {number} is missing from its log")


class LogCheck:
    """Check of a whole log against a head that was read before it."""

    def __init__(self, task_id: str, head: ChainHead) -> None:
        self._task_id, self._head = task_id, head
        self._link: ChainLink | None = None

    def add(self, number: int, event_type: str, data: bytes) -> None:
        """Add the next event. Those before the start of the chain, or logged after the head was read, do not count."""
        start = self._head.start
        if number <= start.number or number > self._head.last.number:
            return
        self._link = self._link or start
        if number != self._link.number + 1:
            raise ChangedCheckpoint(self._task_id, f"event {number} follows event {self._link.number} in its log")
        self._link = self._link.follow(number, event_type.encode(), data)

    def finish(self) -> None:
        """Raise `ChangedCheckpoint` if the events are not those of the head."""
        last, link = self._head.last, self._link or self._head.start
        if link.number != last.number:
            raise ChangedCheckpoint(self._task_id, f"event {link.number + 1} is missing from its log")
        if link != last:
            raise ChangedCheckpoint(self._task_id, f"an event up to {last.number} is not the one that was written")


def checked_chain(
    task_id: str,
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
    if stored is None:
        if not cipher.encrypts:
            return None
        if entries and not cipher.accepts_plain:
            raise ChangedCheckpoint(task_id, f"it has {entries} entries, and the head of their hash chain is missing")
        link = ChainLink(events, START.digest)
        head = ChainHead(None if names is None else len(names), start=link, last=link)
        return HashChain(cipher, head, names)
    known_entries, head = open_head(cipher, stored)
    if known_entries != entries:
        raise ChangedCheckpoint(task_id, f"its last entry is {known_entries}, and the counter {entries}")
    if head.last.number != events:
        raise ChangedCheckpoint(task_id, f"its last event is {head.last.number}, and the counter {events}")
    records = None if names is None else len(names)
    if None not in (records, head.records) and records != head.records:
        raise ChangedCheckpoint(task_id, f"the records of its steps are {records}, and {head.records} were written")
    return HashChain(cipher, head._replace(records=records), names)
