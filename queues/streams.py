"""Readers of the streams of a task: items that its handler emits, followed until the task has ended.

All readers of a stream in one process share a tail. It subscribes to the channels of the stream and of the task's
record, reads each page of new items once, and wakes the readers. A reader that is behind reads pages of its own;
readers at the same place share them. No command blocks on the server, so that all readers of a process need only the
connections that it has anyway, and no time-out of a client can end a read.

The end is not stored: a reader derives it from the record. Its state is read before the last page, so that no item
which was stored before the end is missed.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

from pydantic import TypeAdapter
from pydantic_core import from_json

from .envelope import is_task_id
from .errors import (
    DecryptionError,
    LargeValueLost,
    QueueError,
    StreamTrimmed,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    Unavailable,
)
from .keys import Partition
from .pubsub import LOST, TaskNotifications
from .records import Record, State, read_record
from .security.encryption import TaskCipher
from .stream_items import CUT_ALL, StoredItem, check_stream, decode_item, entry_id
from .transport.backoff import retry_while_unavailable
from .transport.gateway import Gateway
from .wording import iso_time

_PAGE: Final = 200
"""Items that are read at once."""

_POLL_INTERVAL: Final = 30.0
"""Seconds after which a tail reads its stream and the record without a notification."""

_CURSOR: Final = re.compile(r"([0-9]{1,15})(?:@(.+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StreamItem:
    """An item of a stream, a mark that makes items void, a notice of a resume, or the end of the stream.

    Attributes:
        kind: `item`; `cut_off`, a mark; `resumed`, a notice for the user that interrupted work is resumed; or `end`,
            which is the last one.
        cursor: Position of the item. A reader that starts after it (`after=`) gets what follows.
        at: Time in milliseconds of Redis' clock since the epoch; 0 if it is not known.
        stream: Name of the stream.
        task_id: Task that emitted it, which may be a successor of the task that is read.
        value: The item; of a notice, its text.
        step: Key of the step that emitted it, `""` for the body of a function; None for a keyed item.
        attempt: Number of the step's try that emitted it, over all runs. Of a mark: the last try that is void.
        state: Of the end: `succeeded`, `dead`, `cancelled`, or `expired` if the task has no record any more.
        result: Of the end of a task that has succeeded.
        error, error_type: Text and class of what ended the task, None if it has succeeded.
        reason: Of a mark: `retried` (a try was cut off or failed), `replayed` (with `--fresh`), or `lost` (by Redis).
            Of the end: the reason of the dead letter.
        problem: Why the value or the result cannot be read, None if it can.
    """

    kind: Literal["item", "cut_off", "resumed", "end"]
    cursor: str
    at: int
    stream: str
    task_id: str
    value: Any = None
    step: str | None = None
    attempt: int | None = None
    state: Literal["succeeded", "dead", "cancelled", "expired"] | None = None
    result: Any = None
    error: str | None = None
    error_type: str | None = None
    reason: str | None = None
    problem: str | None = None

    def voids(self, item: StreamItem) -> bool:
        """Return whether this is a mark that makes an item void which was received before it: drop the item then."""
        if self.kind != "cut_off" or item.kind != "item" or (item.task_id, item.stream) != (self.task_id, self.stream):
            return False
        if self.reason == "lost":
            return _number(item.cursor) > _number(self.cursor)
        if item.step is None or _number(item.cursor) > _number(self.cursor):
            return False
        if self.step is None:
            return True
        return item.step == self.step and (item.attempt or 0) <= (self.attempt or 0)

    def summary(self) -> dict[str, Any]:
        """Return the item as plain data, without what does not apply to its kind."""
        shown: dict[str, Any] = {"kind": self.kind, "cursor": self.cursor, "at": iso_time(self.at or None)}
        shown |= {"stream": self.stream, "task_id": self.task_id}
        if self.kind == "item":
            shown |= {"value": self.value, "step": self.step, "attempt": self.attempt}
        elif self.kind == "resumed":
            shown |= {"value": self.value}
        elif self.kind == "cut_off":
            shown |= {"step": self.step, "attempt": self.attempt, "reason": self.reason}
        else:
            shown |= {"state": self.state, "result": self.result, "error": self.error, "error_type": self.error_type}
            shown |= {} if self.reason is None else {"reason": self.reason}
        return shown if self.problem is None else shown | {"problem": self.problem}


class Cursor(NamedTuple):
    """A position in the streams of a chain of tasks: number of an item, and id of its task, "" for the first one."""

    number: int
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """The checked arguments of a reader.

    after: the position after which it starts, None for the oldest item that is kept.
    last: at most so many of the items that are stored already, None for all. adapter: type of the values.
    """

    name: str
    adapter: TypeAdapter[Any] | None
    after: Cursor | None
    last: int | None


def stream_query(name: object, type_: Any, after: object, last: object) -> StreamQuery:
    """Return the checked arguments of a reader. Raises `ValueError`."""
    position: Cursor | None = None
    if after is not None:
        found = _CURSOR.fullmatch(str(after)) if isinstance(after, (str, int)) and not isinstance(after, bool) else None
        if found is None or (found[2] is not None and not is_task_id(found[2])):
            raise ValueError(f"after must be the cursor of an item of the stream, such as '17', got {after!r}")
        position = Cursor(int(found[1]), found[2] or "")
    if last is not None and (not isinstance(last, int) or isinstance(last, bool) or last < 0):
        raise ValueError(f"last must be a number of items of at least 0, or None for all, got {last!r}")
    adapter = None if type_ is Any else TypeAdapter(type_)
    return StreamQuery(check_stream(name), adapter, position, last)


class StreamedTask(Protocol):
    """The part of a task's handle that readers of its streams use."""

    id: str
    partition: Partition
    decode: Callable[[bytes], Any]

    async def record(self) -> Record: ...

    async def successor(self) -> StreamedTask | None: ...

    async def read_result(self) -> bytes: ...


async def read_stream(
    handle: StreamedTask, gateway: Gateway, notifications: TaskNotifications, query: StreamQuery
) -> AsyncGenerator[StreamItem]:
    """Yield the items of a task's stream and of the streams of its successors, then the end.

    Raises:
        ValueError: The cursor is of another task.
        TaskNotFound: There is no record of the task.
        StreamTrimmed: Items after the cursor, or that a slow reader has not read, are not kept any more.
    """
    await retry_while_unavailable(handle.record)
    current, after, last = await _start_of(handle, query), query.after, query.last
    number = None if after is None or (after.task_id or handle.id) != current.id else after.number
    while True:
        where = "" if current is handle else f"@{current.id}"
        async with _reading(current, gateway, notifications, query.name) as tail:
            reader = _Reader(tail, query, where, number, last)
            following: StreamedTask | None = None
            end: StreamItem | None = None
            while not reader.ended:  # Redis may lose the end before all of it was read
                while items := await reader.read():
                    for item in items:
                        yield item
                following, end = await _what_follows(current, query.name, reader)
        if end is not None:
            yield end
        if following is None:
            return
        current, number, last = following, None, None


async def _what_follows(
    handle: StreamedTask, stream: str, reader: _Reader
) -> tuple[StreamedTask | None, StreamItem | None]:
    """Return the successor of a task that has ended, or the end of its stream."""
    record = reader.record
    if record is not None and record.handed_to is not None:
        try:
            if (following := await retry_while_unavailable(handle.successor)) is not None:
                return following, None
        except TaskNotFound:
            record = None
    return None, await _end(handle, stream, reader.cursor, record)


async def _start_of(handle: StreamedTask, query: StreamQuery) -> StreamedTask:
    """Return the task of the chain that a reader starts at: the one of its cursor, the newest one to read the last."""
    current, wanted = handle, None if query.after is None else query.after.task_id or handle.id
    found = wanted in (None, current.id)
    while not found or query.last is not None:
        following = await retry_while_unavailable(current.successor)
        if following is None:
            break
        current = following
        found = found or current.id == wanted
    if not found:
        raise ValueError(
            f"after must be a cursor of task {handle.id} or of a successor of it, got one of task {wanted}"
        )
    return current


async def _end(handle: StreamedTask, stream: str, cursor: str, record: Record | None) -> StreamItem:
    """Return the end of a stream. record: of the task that has ended, None if it is gone."""
    end = partial(StreamItem, "end", cursor, stream=stream, task_id=handle.id)
    if record is not None and record.state is State.SUCCEEDED:
        at = record.finished_at or 0
        try:
            return end(at, state="succeeded", result=handle.decode(await retry_while_unavailable(handle.read_result)))
        except (DecryptionError, LargeValueLost, ValueError) as error:
            return end(at, state="succeeded", problem=str(error))
        except TaskNotFound:
            record = None
    if record is None:
        text = f"task {handle.id} has no record any more: its retention has passed, or it was purged or forgotten"
        return end(0, state="expired", error=text, error_type=TaskNotFound.__name__)
    at = record.finished_at or 0
    if record.state is State.CANCELLED:
        return end(at, state="cancelled", error=str(TaskCancelled(handle.id)), error_type=TaskCancelled.__name__)
    evidence = record.error or {}
    text = str(evidence.get("message") or TaskFailed(handle.id, record.reason or "unknown", {}))
    kind = str(evidence.get("error") or TaskFailed.__name__)
    return end(at, state="dead", error=text, error_type=kind, reason=record.reason)


@asynccontextmanager
async def _reading(
    handle: StreamedTask, gateway: Gateway, notifications: TaskNotifications, name: str
) -> AsyncIterator[StreamTail]:
    """Join the tail of a stream for a block; the last reader closes it."""
    tails, key = notifications.tails, handle.partition.stream(handle.id, name)
    if key not in tails or tails[key].ended:  # since then, the id may have been given to another task
        tails[key] = StreamTail(gateway, notifications, handle.partition, handle.id, name)
    tail: StreamTail = tails[key]
    tail.readers += 1
    try:
        await tail.open()
        yield tail
    finally:
        tail.readers -= 1
        if not tail.readers:
            if tails.get(key) is tail:
                del tails[key]
            await tail.close()


class _Entry(NamedTuple):
    """A decrypted entry. data: JSON. problem: why it cannot be read."""

    stored: StoredItem
    data: bytes
    problem: str | None


class _Page(NamedTuple):
    """Entries after a number.

    Attributes:
        after: the number.
        entries: in order; all that there were when it was read, unless it is `full`.
        changes: number of notifications before the read.
        ended: whether the task had ended before the read.
    """

    after: int
    entries: Sequence[_Entry]
    changes: int
    full: bool
    ended: bool

    @property
    def last(self) -> int:
        return self.entries[-1].stored.number if self.entries else self.after

    def contradicts(self, earlier: _Page) -> bool:
        """Return whether this page lacks the last entry of an earlier one, or has another in its place."""
        last = earlier.last
        if not earlier.entries or self.after >= last or (self.full and self.last < last):
            return False
        return [*earlier.entries[-1:]] != [*self.following(last - 1)[:1]]

    def following(self, number: int) -> Sequence[_Entry]:
        """Return the entries after a number."""
        if number == self.after:
            return self.entries
        return self.entries[bisect_right(self.entries, number, key=lambda entry: entry.stored.number) :]


_ENDED: Final = frozenset((b"succeeded", b"dead", b"cancelled", None))
"""States of a record after which no item is stored; None if there is no record."""


class StreamTail:
    """The end of one stream, for all readers of it in this process.

    Attributes:
        readers: number of the readers.
        changes: notifications so far.
        losses: how often it was noticed that Redis had lost the end of the stream. Others may have the numbers of the
            lost items, so it is not known how many they are: readers begin again.
    """

    def __init__(
        self, gateway: Gateway, notifications: TaskNotifications, partition: Partition, task_id: str, name: str
    ) -> None:
        self.task_id, self.name = task_id, name
        self.readers = 0
        self.changes = 0
        self.losses = 0
        self._gateway, self._notifications, self._partition = gateway, notifications, partition
        self._cipher: TaskCipher = gateway.encryptor.of(partition, task_id)
        self._key, self._record = partition.stream(task_id, name), partition.record(task_id)
        self._channel = self._key.encode()
        self._stack: AsyncExitStack | None = None
        self._opening = asyncio.Lock()
        self._newest: _Page | None = None  # the page with the highest numbers
        self._latest: _Page | None = None  # the last read after these, which may have found nothing
        self._ended: bool | None = None  # None: not known, since the record has changed
        self._record_changes = 0
        self._unsure = False  # whether Redis may have lost the end of the stream
        self._reads: dict[int, asyncio.Task[_Page]] = {}
        self._following: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether the task had ended at the last read of its state."""
        return self._ended is True

    async def open(self) -> None:
        """Subscribe, unless another reader has. Retries until Redis is available."""
        async with self._opening:
            if self._stack is None:
                stack, channels = AsyncExitStack(), (self._key, self._record)
                await retry_while_unavailable(
                    lambda: stack.enter_async_context(self._notifications.watch(channels, self._notified))
                )
                self._stack = stack
                self._set_timer()

    async def close(self) -> None:
        """Unsubscribe. Called once, after the last reader has left."""
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._following, *self._reads.values()):
            if task is not None:
                task.cancel()
        if self._stack is not None:
            await self._stack.aclose()

    async def record(self) -> Record | None:
        """Return the record of the task."""
        record = await retry_while_unavailable(lambda: read_record(self._gateway, self._partition, self.task_id))
        if record is not None and not record.state.terminal:
            self._ended = None  # it was replayed
        return record

    async def newest(self) -> StoredItem | None:
        """Return the newest item of the stream, None without any."""
        entries = await retry_while_unavailable(
            lambda: self._gateway.command("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        )
        return self._opened(*entries[0]).stored if entries else None

    async def page(self, after: int) -> _Page:
        """Return items after a number, from memory if they are the newest. Readers at one place share a read."""
        while True:
            while self._doubtful:
                await self._woken.wait()
            newest, latest = self._newest, self._latest
            if newest is not None and newest.after <= after < newest.last:
                return newest
            if latest is not None and latest.after == after and latest.changes == self.changes:
                return latest
            page = await asyncio.shield(self._read(after))
            if not self._doubtful:
                return page

    async def changed(self, since: _Page) -> None:
        """Wait until there may be more than a page without entries says."""
        while self.changes == since.changes and (self._newest is None or self._newest.last <= since.after):
            await self._woken.wait()

    # notifications

    @property
    def _doubtful(self) -> bool:
        """Whether Redis may have lost the end of the stream, which is looked up: a page may not follow the last one."""
        return self._unsure and self._following is not None

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL, self._poll)

    def _poll(self) -> None:
        self._set_timer()
        self._notified(self._channel, LOST)

    def _notified(self, channel: bytes, notification: bytes) -> None:
        if channel != self._channel or notification == LOST:
            self._ended = None
            self._record_changes += 1
            self._unsure = self._unsure or notification == LOST
        elif self._newest is not None and notification.isdigit() and int(notification) <= self._newest.last:
            return  # it was read already
        self.changes += 1
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(), name=f"perdure tail {self._key}")

    async def _follow(self) -> None:
        """Read what is new, and wake the readers. Their own reads raise what this one raises."""
        seen = None
        try:
            while seen != self.changes:
                seen = self.changes
                if self._unsure:
                    await self._look_for_losses()
                    self._unsure = seen != self.changes
                if self._newest is not None:
                    await asyncio.wait([self._read(self._newest.last)])
                self._wake()
        except QueueError:
            self._unsure = True
        finally:
            self._following = None
            self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def _look_for_losses(self) -> None:
        """Find out whether the items that were read last are still there: Redis may have lost its last writes."""
        known = self._newest
        if known is None or not known.last:
            return
        place = entry_id(known.last)
        reads = [("HGET", self._record, "state"), ("XRANGE", self._key, place, place)]
        state, found = await retry_while_unavailable(lambda: self._gateway.pipeline(reads))
        entries = [self._opened(*entry).stored for entry in found]
        if state is None or (entries and entries == [entry.stored for entry in known.entries[-1:]]):
            return
        newest = await self.newest()
        replaced = bool(entries and known.entries)
        if (replaced or newest is None or newest.number < known.last) and self._newest is known:  # else it was trimmed
            self.losses += 1
            self._newest = self._latest = None

    # reads

    def _doubt(self, _: Unavailable) -> None:
        """Note that the reply to a read may be of a Redis that has lost the end of the stream."""
        self._notified(self._channel, LOST)

    def _read(self, after: int) -> asyncio.Task[_Page]:
        """Return the read of the page after a number, which is started unless it runs."""
        task = self._reads.get(after)
        if task is None or task.done():  # its callback has not run yet
            task = self._reads[after] = asyncio.get_running_loop().create_task(self._load(after))
            task.add_done_callback(partial(self._loaded, after))
        return task

    def _loaded(self, after: int, task: asyncio.Task[_Page]) -> None:
        if self._reads.get(after) is task:
            del self._reads[after]
        if task.cancelled() or task.exception() is not None:
            return
        page = task.result()
        if self._newest is not None and page.contradicts(self._newest):
            self._notified(self._channel, LOST)  # which looks for the loss before it reads on
            return
        if self._newest is None or (page.entries and page.last >= self._newest.last):
            self._newest = page
            self._wake()  # a reader may have read before these were stored, and their notification counts no more
        if page.last >= self._newest.last:
            self._latest = page

    async def _load(self, after: int) -> _Page:
        changes, record_changes, ended = self.changes, self._record_changes, self._ended
        read = ("XRANGE", self._key, entry_id(after + 1), "+", "COUNT", _PAGE)
        if ended is None:
            state, entries = await retry_while_unavailable(
                lambda: self._gateway.pipeline([("HGET", self._record, "state"), read]), on_wait=self._doubt
            )
            ended = state in _ENDED
            if record_changes == self._record_changes:
                self._ended = ended
        else:
            entries = await retry_while_unavailable(lambda: self._gateway.command(*read), on_wait=self._doubt)
        return _Page(after, [self._opened(*entry) for entry in entries], changes, len(entries) == _PAGE, ended)

    def _opened(self, entry: bytes, fields: Sequence[bytes]) -> _Entry:
        return _opened(entry, fields, self.name, self._cipher)


class _Reader:
    """One reader of a tail.

    Attributes:
        record: of the task, after the last item; None if it is gone.
    """

    def __init__(self, tail: StreamTail, query: StreamQuery, where: str, after: int | None, last: int | None) -> None:
        """where: what the cursors of this task end with."""
        self.record: Record | None = None
        self._tail, self._query, self._where = tail, query, where
        self._after, self._last = after, last
        self._position = after or 0
        self._strict = False  # whether the next item must be there
        self._started = False
        self._losses = tail.losses
        self._emitted: dict[tuple[str, int], int] = {}  # last position of each try of a unit
        self._changes: int | None = None  # of the tail, when it was found that the task has ended

    @property
    def ended(self) -> bool:
        """Whether `read` has found that the task has ended, and nothing has changed since."""
        return self._changes == self._tail.changes

    @property
    def cursor(self) -> str:
        """Cursor of the last item."""
        return f"{self._position}{self._where}"

    async def read(self) -> list[StreamItem]:
        """Wait for further items, and return them; none if the task has ended."""
        tail = self._tail
        if not self._started:
            self._started = True
            if (lost := await self._start()) is not None:
                return [lost]
        while True:
            if self._losses != tail.losses:
                self._losses = tail.losses
                if self._position:
                    return [self._lost()]
            page = await tail.page(self._position)
            if self._losses != tail.losses:
                continue
            if entries := page.following(self._position):
                self._check_gap(entries[0].stored.number)
                self._strict = True
                items = [self._item(entry) for entry in entries]
                self._position = entries[-1].stored.number
                return items
            if page.full or page.changes != tail.changes:
                continue
            if page.ended:
                self._changes = page.changes
                self.record = await tail.record()
                if self.record is None or self.record.state.terminal:
                    return []
                continue
            await tail.changed(page)

    async def _start(self) -> StreamItem | None:
        """Find the position to start at. Return a mark if Redis has lost the items before it."""
        if self._after is None and self._last is None:
            return None
        newest = await self._tail.newest()
        number = 0 if newest is None else newest.number
        self._strict = self._after is not None
        if self._position > number:
            return self._lost()
        if self._last is not None and number - self._last > self._position:
            self._position, self._strict = number - self._last, False
        return None

    def _lost(self) -> StreamItem:
        self._position, self._strict = 0, False
        self._emitted.clear()
        return StreamItem("cut_off", self.cursor, 0, self._tail.name, self._tail.task_id, reason="lost")

    def _item(self, entry: _Entry) -> StreamItem:
        """Return an entry as readers get it. One that another program has moved or copied is an item with a problem."""
        stored, unit = entry.stored, (entry.stored.unit, entry.stored.attempt)
        if stored.cut == CUT_ALL:
            self._emitted.clear()
        elif entry.problem is None and not stored.cut and not stored.key:
            before = self._emitted.get(unit, 0)
            if stored.position <= before:
                entry = entry._replace(
                    data=b"", problem=f"item {stored.position} of its step comes after item {before}"
                )
            self._emitted[unit] = max(before, stored.position)
        return _item(entry, self._tail.name, self._tail.task_id, self._where, self._query.adapter)

    def _check_gap(self, number: int) -> None:
        if self._strict and number > self._position + 1:
            first, last = self._position + 1, number - 1
            raise StreamTrimmed(self._tail.task_id, self._tail.name, first, last, f"{last}{self._where}")


def opened_items(
    entries: Sequence[tuple[bytes, Sequence[bytes]]], name: str, task_id: str, cipher: TaskCipher
) -> list[StreamItem]:
    """Decode and decrypt entries of a stream."""
    return [_item(_opened(*entry, name, cipher), name, task_id) for entry in entries]


def _opened(entry: bytes, fields: Sequence[bytes], name: str, cipher: TaskCipher) -> _Entry:
    """Decode and decrypt an entry. What another program wrote is an item with a problem."""
    try:
        stored = decode_item(entry, fields)
    except ValueError as error:
        return _Entry(StoredItem(int(entry.partition(b"-")[0]), 0), b"", str(error))
    if stored.cut:
        return _Entry(stored, b"", None)
    try:
        return _Entry(stored, cipher.decrypt(stored.field(name), stored.data), None)
    except DecryptionError as error:
        return _Entry(stored, b"", str(error))


def _item(
    entry: _Entry, name: str, task_id: str, where: str = "", adapter: TypeAdapter[Any] | None = None
) -> StreamItem:
    """Return an entry as readers get it. where: what the cursors of its task end with."""
    stored, data, problem = entry
    cursor = f"{stored.number}{where}"
    if stored.cut == CUT_ALL:
        return StreamItem("cut_off", cursor, stored.at, name, task_id, reason="replayed")
    step, attempt = (None, None) if stored.key else (stored.unit, stored.attempt)
    if stored.cut:
        return StreamItem("cut_off", cursor, stored.at, name, task_id, step=step, attempt=attempt, reason="retried")
    value = None
    if problem is None:
        try:
            value = from_json(data) if adapter is None or stored.is_notice else adapter.validate_json(data)
        except ValueError as error:
            problem = f"the value does not fit: {error}"
    kind: Literal["item", "resumed"] = "resumed" if stored.is_notice else "item"
    item = partial(StreamItem, kind, cursor, stored.at, name, task_id, value)
    return item(step=step, attempt=attempt, problem=problem)


def _number(cursor: str) -> int:
    return int(cursor.partition("@")[0])
