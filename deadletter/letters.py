"""Dead letters: list, filter, find, count."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import heapq
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from ..queues.envelope import Envelope, is_task_id, plain_data, readable_envelope
from ..queues.errors import DecryptionError, LargeValueLost, Refused, UnreadableRecord
from ..queues.junk import is_entry_id, split
from ..queues.keys import Partition, belongs_to
from ..queues.records import opened_evidence, shown_arguments
from ..queues.security.encryption import NO_CIPHER, TaskCipher, is_encrypted
from ..queues.security.secret_arguments import SecretPaths, mask, read_secret_paths
from ..queues.transport.gateway import Gateway
from ..queues.transport.scripts import pairs
from ..queues.wording import iso_time
from .policy import Reason

if TYPE_CHECKING:
    from ..queues.argument_conditions import ArgumentCondition

PAGE: Final = 200
"""Letters of one page, read from one partition."""


FINGERPRINT: Final = 10
"""Hexadecimal digits of a fingerprint: by chance, two of a million groups have the same."""

_WORD: Final = re.compile(r"[0-9A-Za-z_.,:-]+")
_DIGIT: Final = re.compile(r"[0-9]")
_HEX: Final = frozenset("abcdefABCDEF-")
_FRAME: Final = re.compile(r'^ *File "([^"\n]*)", line [0-9]+, in (.*)$', re.MULTILINE)

_MESSAGE: Final = 500
"""Characters of the message that make the fingerprint."""


def fingerprint(task: str, reason: str, error: str, message: str, traceback: str) -> str:
    """Return the fingerprint of an error, in hexadecimal digits: that of a group of dead letters with the same cause.

    Letters have the same one if task, reason and type of the error are the same, and the first line of its message too,
    without what differs from one task to the next: numbers, ids and times. So do the file and the function that raised
    it, but not the line: a change elsewhere in the file makes no other group.
    """
    first = next(iter(message.strip().splitlines()), "")[: 4 * _MESSAGE]
    frames = _FRAME.findall(traceback)
    file, function = frames[-1] if frames else ("", "")
    place = file.replace("\\", "/").rpartition("/")[2]
    text = "\0".join((task, reason, error, _WORD.sub(_without_number, first)[:_MESSAGE], place, function))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:FINGERPRINT]


def _without_number(word: re.Match[str]) -> str:
    """Return a word as it is if it has no digit, else its part before the first one, and 0.

    Hexadecimal letters before the first digit are left out too: a UUID or a hash may start with them.
    """
    text = word[0]
    digit = _DIGIT.search(text)
    if digit is None:
        return text
    head = text[: digit.start()]
    return "0" if _HEX.issuperset(head) else f"{head}0"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that was given up. Times are milliseconds of Redis' clock.

    Attributes:
        args: As stored: with secrets, possibly encrypted. `shown_arguments` is for display.
        masked: Paths of arguments that are masked for display besides `secrets`: the definition of the task marks them.
        raw: Fields of an unreadable message, as stored.
    """

    id: str
    entry: str
    partition: Partition
    task: str
    reason: Reason | str
    error: str
    message: str
    traceback: str
    attempts: int
    crashes: int
    worker: str
    enqueued_at: int
    died_at: int
    args: bytes | None
    envelope: Envelope | None
    raw: Mapping[str, bytes]
    secrets: SecretPaths = ()
    masked: SecretPaths = field(default=(), repr=False)
    cipher: TaskCipher = field(default=NO_CIPHER, repr=False, compare=False)

    def shown_arguments(self) -> bytes | None:
        """Return the arguments as JSON with masked secrets, or why they cannot be decrypted."""
        if self.envelope is None and self.args is not None and is_encrypted(self.args):
            return b"(encrypted, and the envelope with the name of the task cannot be read)"
        return shown_arguments(self.cipher, self.task, self.args, self.secrets, self.masked)

    @property
    def app(self) -> str | None:
        """Name of the app whose workers run it; None if any app with a task of this name may."""
        return self.envelope.app if self.envelope else None

    @property
    def fingerprint(self) -> str:
        """The name of the group of dead letters with the same cause."""
        return fingerprint(self.task, str(self.reason), self.error, self.message, self.traceback)

    def summary(self) -> dict[str, Any]:
        """Return the letter as plain data; times as ISO 8601, bytes that are not UTF-8 as base64."""
        return {
            "id": self.id,
            "queue": self.partition.queue,
            "partition": self.partition.index,
            "task": self.task,
            "app": self.app,
            "reason": str(self.reason),
            "group": self.fingerprint,
            "error": self.error,
            "message": self.message,
            "traceback": self.traceback,
            "attempts": self.attempts,
            "crashes": self.crashes,
            "worker": self.worker,
            "enqueued_at": iso_time(self.enqueued_at),
            "died_at": iso_time(self.died_at),
            "args": _data(self.shown_arguments()),
            "headers": self.envelope.headers if self.envelope else {},
            "key": self.envelope.key if self.envelope else None,
            "tags": list(self.envelope.tags) if self.envelope else [],
            "raw": {name: _text(self._shown_raw(name, value)) for name, value in self.raw.items()},
        }

    def _shown_raw(self, name: str, value: bytes) -> bytes:
        return mask(value, (*self.secrets, *self.masked)) if name == "args" else value


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of dead letters. None matches all.

    Attributes:
        since, until: Bounds of the time of death, in milliseconds of Redis' clock.
        error: Text in the reason, the name or the message of the error, in any case.
        search: Text anywhere in the letter as it is shown, in any case: in its arguments and traceback too.
        group: First characters of the fingerprint.
        key: The ordering key of the task.
        tags: All of them.
        where: Conditions on the arguments, all of them. They are read apart from the letter.
        tenant: Only those of tasks of this tenant.
    """

    reason: Reason | None = None
    task: str | None = None
    since: int | None = None
    until: int | None = None
    error: str | None = None
    key: str | None = None
    tags: tuple[str, ...] = ()
    app: str | None = None
    search: str | None = None
    group: str | None = None
    where: tuple[ArgumentCondition, ...] = ()
    tenant: str | None = None

    def form(self) -> dict[str, Any]:
        """Return the filter as JSON data, for `parse`."""
        names = ("task", "since", "until", "error", "key", "app", "search", "group", "tenant")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reason is not None:
            found["reason"] = str(self.reason)
        if self.tags:
            found["tags"] = list(self.tags)
        if self.where:
            found["where"] = [str(condition) for condition in self.where]
        return found

    @classmethod
    def parse(cls, form: Mapping[str, Any]) -> Filter:
        """Return the filter of JSON data. Raises `ValueError`, `TypeError` for data of another form."""
        from ..queues.argument_conditions import ArgumentCondition  # a plain task needs none of it

        known = dict(form)
        reason = known.pop("reason", None)
        where = tuple(ArgumentCondition.parse(str(given)) for given in known.pop("where", ()))
        return cls(None if reason is None else Reason(reason), tags=tuple(known.pop("tags", ())), where=where, **known)

    def at_most(self, until: int) -> Filter:
        """Return this filter for letters that died by a time, in milliseconds."""
        return replace(self, until=until if self.until is None else min(until, self.until))

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a letter matches, apart from its arguments."""
        key, tags = (letter.envelope.key, letter.envelope.tags) if letter.envelope else (None, ())
        return (
            belongs_to(self.tenant, letter.id)
            and (self.reason is None or letter.reason == self.reason)
            and self.task in (None, letter.task)
            and self.app in (None, letter.app)
            and (self.since is None or letter.died_at >= self.since)
            and (self.until is None or letter.died_at <= self.until)
            and self.key in (None, key)
            and all(tag in tags for tag in self.tags)
            and (self.error is None or self.error.casefold() in _error_text(letter))
            and (self.group is None or letter.fingerprint.startswith(self.group.lower()))
            and (self.search is None or self.search.casefold() in _text_of(letter))
        )


def _error_text(letter: DeadLetter) -> str:
    return f"{letter.reason} {letter.error}: {letter.message}".casefold()


def _text_of(letter: DeadLetter) -> str:
    """Return all texts of a letter as it is shown, in lower case: secrets are masked."""
    found: list[str] = []
    _add_texts(letter.summary(), found)
    return "\n".join(found).casefold()


def _add_texts(value: Any, found: list[str]) -> None:
    if isinstance(value, Mapping):
        for name, member in value.items():
            found.append(str(name))
            _add_texts(member, found)
    elif isinstance(value, list):
        for member in value:
            _add_texts(member, found)
    elif isinstance(value, bool) or value is None:
        found.append(orjson.dumps(value).decode())
    else:
        found.append(str(value))


def _as_stored(letter: DeadLetter) -> DeadLetter:
    return letter


async def list_letters(
    gateway: Gateway,
    partitions: Sequence[Partition],
    wanted: Filter,
    *,
    oldest_first: bool = False,
    shown: Callable[[DeadLetter], DeadLetter] = _as_stored,
) -> AsyncIterator[DeadLetter]:
    """Yield the matching dead letters of all partitions, merged by time, newest first by default.

    Args:
        shown: Returns each letter as it is compared and yielded, such as with more masked arguments.
    """
    async for found in scan_letters(gateway, partitions, wanted, oldest_first=oldest_first, shown=shown):
        if found.matches:
            yield found.letter


class ScannedLetter(NamedTuple):
    """A dead letter that was compared with a filter.

    position: place in the order of the scan. problem: why its arguments cannot be compared; then it does not match.
    """

    letter: DeadLetter
    position: str
    matches: bool
    problem: str = ""


async def scan_letters(
    gateway: Gateway,
    partitions: Sequence[Partition],
    wanted: Filter,
    *,
    oldest_first: bool = False,
    shown: Callable[[DeadLetter], DeadLetter] = _as_stored,
    after: str | None = None,
) -> AsyncIterator[ScannedLetter]:
    """Yield all dead letters of partitions, merged by time, each with whether it matches.

    Args:
        shown: See `list_letters`.
        after: Position after which the scan continues, in the same order.

    Raises:
        ValueError: The position is not one of a scan.
    """
    beyond = None if after is None else _read_position(after)
    pages = await asyncio.gather(*(_Pages.begin(gateway, partition, oldest_first, beyond) for partition in partitions))
    for page in pages:
        if page.problem and after is None:
            refused = _damaged(page.partition, b"0-0", "-", page.problem)
            if wanted.matches(refused):
                yield ScannedLetter(refused, "", not wanted.where)
    heads = [(page.order, position) for position, page in enumerate(pages) if page.entries]
    heapq.heapify(heads)
    while heads:
        (milliseconds, number, *_), position = heads[0]
        page = pages[position]
        place = f"{abs(milliseconds)}-{abs(number)} {page.partition.queue} {page.partition.index}"
        letter = shown(await _listed(gateway, page.partition, *page.entries.popleft()))
        if not page.entries:
            await page.load()
        if page.entries:
            heapq.heapreplace(heads, (page.order, position))
        else:
            heapq.heappop(heads)
        matches, problem = wanted.matches(letter), ""
        if matches and wanted.where:
            from ..queues.task_filter import arguments_match  # a plain task needs none of it

            paths = (*letter.secrets, *letter.masked)
            try:
                matches = await arguments_match(
                    gateway, page.partition, letter.id, letter.task, letter.args, paths, wanted.where
                )
            except (DecryptionError, LargeValueLost) as error:
                matches, problem = False, str(error)
        yield ScannedLetter(letter, place, matches, problem)


def _read_position(text: str) -> tuple[int, int, str, int]:
    """Parse a position. Raises `ValueError`."""
    entry, queue, index = text.split(" ")
    milliseconds, number = entry.split("-")
    return int(milliseconds), int(number), queue, int(index)


class LetterPage(NamedTuple):
    """Dead letters of one page, the newest first.

    cursor: continues the list, None after the last page. read: number of letters that were compared. unreadable: those
    whose arguments the filter has conditions on and that cannot be read, with the problem.
    """

    letters: list[DeadLetter]
    cursor: str | None
    read: int
    unreadable: list[tuple[DeadLetter, str]]


async def page_letters(
    gateway: Gateway,
    partitions: Sequence[Partition],
    wanted: Filter,
    *,
    limit: int,
    max_read: int,
    cursor: str | None = None,
    shown: Callable[[DeadLetter], DeadLetter] = _as_stored,
) -> LetterPage:
    """Return a page of the matching dead letters of all partitions, the newest first.

    A page may have fewer letters than `limit` before the list ends, because it reads at most `max_read`.

    Args:
        cursor: That of the previous page.
        shown: See `list_letters`.

    Raises:
        ValueError: The cursor is not one of a page.
    """
    after = None if cursor is None else _position_of(cursor)
    page = LetterPage([], None, 0, [])
    read = 0
    async for found in scan_letters(gateway, partitions, wanted, shown=shown, after=after):
        if len(page.letters) == limit or read == max_read:
            return page._replace(cursor=None if after is None else _cursor_of(after), read=read)
        read += 1
        after = found.position or after
        if found.matches:
            page.letters.append(found.letter)
        elif found.problem:
            page.unreadable.append((found.letter, found.problem))
    return page._replace(read=read)


def _cursor_of(position: str) -> str:
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def _position_of(cursor: str) -> str:
    try:
        position = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode()
        at, number, *_ = _read_position(position)
        if not 0 <= max(at, number) < 1 << 63:
            raise ValueError(position)
    except ValueError:
        raise ValueError(
            f"cursor must be one that an earlier page of the same list ended with, got {cursor[:80]!r}"
        ) from None
    return position


async def count_letters(gateway: Gateway, partitions: Sequence[Partition]) -> int:
    """Return the number of dead letters in the partitions."""
    counts = await gateway.pipeline_each([("XLEN", partition.dead) for partition in partitions])
    return sum(count for count in counts if isinstance(count, int))


async def find_letter(gateway: Gateway, partitions: Sequence[Partition], task_id: str) -> DeadLetter | None:
    """Return the dead letter of one task, or None. One that cannot be read has the reason `damaged`.

    Args:
        task_id: `entry-ENTRY` finds a damaged letter that no record names, as `list_letters` shows it.
    """
    unnamed = _UNNAMED.fullmatch(task_id)
    if unnamed:
        found: Sequence[Any] = [unnamed[1].encode()] * len(partitions)
    else:
        found = await gateway.pipeline_each([("HGET", partition.record(task_id), "dead") for partition in partitions])
    for partition, entry in zip(partitions, found, strict=True):
        if isinstance(entry, bytes) and is_entry_id(entry):
            (page,) = await gateway.pipeline_each([("XRANGE", partition.dead, entry, entry)])
            if isinstance(page, list) and page:
                return await _listed(gateway, partition, *page[0])
    return None


_UNNAMED: Final = re.compile(r"entry-([0-9]{1,20}-[0-9]{1,20})")
"""Id of a damaged letter that no record names."""


@dataclass(slots=True)
class _Pages:
    """The dead letters of one partition, page by page.

    Letters that were buried after the first page are left out, because a replayed task may die again.
    """

    gateway: Gateway
    partition: Partition
    oldest_first: bool
    newest: bytes
    entries: deque[tuple[bytes, list[bytes]]] = field(default_factory=deque)
    start: bytes = b"-"
    last: bytes = b""
    more: bool = True
    problem: str = ""

    @classmethod
    async def begin(
        cls,
        gateway: Gateway,
        partition: Partition,
        oldest_first: bool,
        beyond: tuple[int, int, str, int] | None = None,
    ) -> _Pages:
        """Read the first page. beyond: position of the letter after which it begins, of any partition."""
        try:
            newest = await gateway.command("XREVRANGE", partition.dead, "+", "-", "COUNT", 1)
        except Refused as error:  # the key has another type
            return cls(gateway, partition, oldest_first, b"", more=False, problem=f"key {partition.dead}: {error}")
        pages = cls(gateway, partition, oldest_first, newest[0][0] if newest else b"", more=bool(newest))
        if beyond is not None:
            at, number, *place = beyond
            follows = place < [partition.queue, partition.index]  # so a letter of the same time is still to come
            if oldest_first:
                pages.start = b"%d-%d" % (at, number if follows else number + 1)
            else:
                pages.last = b"%d-%d" % (at, number + 1 if follows else number)
        elif newest and not oldest_first:
            pages.entries.append(newest[0])
            pages.last = pages.newest
        await pages.load()
        return pages

    @property
    def order(self) -> tuple[int, int, str, int]:
        """Sort key of the next letter among those of other partitions."""
        milliseconds, _, number = self.entries[0][0].partition(b"-")
        sign = 1 if self.oldest_first else -1
        return sign * int(milliseconds), sign * int(number), self.partition.queue, self.partition.index

    async def load(self) -> None:
        """Read the next page if this one is used up."""
        if self.entries or not self.more:
            return
        beyond = b"(" + self.last
        start, end = (beyond if self.last else self.start, self.newest) if self.oldest_first else (beyond, b"-")
        command = "XRANGE" if self.oldest_first else "XREVRANGE"
        page = await self.gateway.command(command, self.partition.dead, start, end, "COUNT", PAGE)
        self.entries.extend(page)
        self.more = len(page) == PAGE
        if page:
            self.last = page[-1][0]


DAMAGED: Final = "damaged"
"""Reason of a dead letter that cannot be read, because another program has written it."""


async def _listed(gateway: Gateway, partition: Partition, entry: bytes, flat: list[bytes]) -> DeadLetter:
    """Return a letter; of one that cannot be read, its place and the problem."""
    try:
        return _letter(gateway, partition, entry, flat)
    except UnreadableRecord as error:
        known = pairs(flat)
        raw = {name.decode("utf-8", "backslashreplace"): value for name, value in known.items()}
        task_id = await _owner(gateway, partition, entry, known.get(b"id", b""))
        return _damaged(partition, entry, task_id or f"entry-{entry.decode()}", str(error), raw)


async def _owner(gateway: Gateway, partition: Partition, entry: bytes, named: bytes) -> str | None:
    """Return the id that a damaged letter names, if the record of this task names the letter, too."""
    for task_id in split([named], is_task_id).good:
        (known,) = await gateway.pipeline_each([("HGET", partition.record(task_id), "dead")])
        if known == entry:
            return task_id
    return None


def _damaged(
    partition: Partition, entry: bytes, task_id: str, problem: str, raw: Mapping[str, bytes] | None = None
) -> DeadLetter:
    at = int(entry.partition(b"-")[0])
    return DeadLetter(
        id=task_id,
        entry=entry.decode(),
        partition=partition,
        task="?",
        reason=DAMAGED,
        error=UnreadableRecord.__name__,
        message=problem,
        traceback="",
        attempts=0,
        crashes=0,
        worker="",
        enqueued_at=at,
        died_at=at,
        args=None,
        envelope=None,
        raw=raw or {},
    )


def _letter(gateway: Gateway, partition: Partition, entry: bytes, flat: list[bytes]) -> DeadLetter:
    """Raises `UnreadableRecord`."""
    try:
        return _decoded(gateway, partition, entry, pairs(flat))
    except KeyError as error:
        problem = f"field {error.args[0].decode()} is missing"
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        problem = f"a field is damaged ({error})"
    remedy = "see its fields with 'perdure dlq show', and delete it with 'perdure dlq purge'"
    raise UnreadableRecord(f"entry {entry.decode()} of {partition.dead}", problem, remedy)


def _decoded(gateway: Gateway, partition: Partition, entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    cipher = gateway.encryptor.of(partition, fields[b"id"].decode())
    evidence = opened_evidence(cipher, fields[b"evidence"])
    died_at = int(entry.partition(b"-")[0])
    return DeadLetter(
        id=fields[b"id"].decode(),
        entry=entry.decode(),
        partition=partition,
        task=fields[b"task"].decode(),
        reason=_reason(fields[b"reason"].decode()),
        error=str(evidence.get("error", "")),
        message=str(evidence.get("message", "")),
        traceback=str(evidence.get("traceback", "")),
        attempts=int(fields[b"attempts"]),
        crashes=int(fields[b"crashes"]),
        worker=fields[b"worker"].decode(),
        enqueued_at=int(float(fields.get(b"at", died_at))),
        died_at=died_at,
        args=fields.get(b"args", fields.get(b"raw:args")),
        envelope=readable_envelope(fields.get(b"env")),
        raw={
            name.removeprefix(b"raw:").decode("utf-8", "replace"): value
            for name, value in fields.items()
            if name.startswith(b"raw:")
        },
        secrets=read_secret_paths(fields.get(b"env", fields.get(b"raw:env", b""))),
        cipher=cipher,
    )


def _reason(text: str) -> Reason | str:
    """Return the reason; a text that only a later version knows as it is."""
    try:
        return Reason(text)
    except ValueError:
        return text


def _data(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return plain_data(value)
    except ValueError:
        return _text(value)


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()
