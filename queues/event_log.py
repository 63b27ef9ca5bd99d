"""The event log of a task, read from outside; its tail, with what is saved in the checkpoint.

An entry of the log has a type, and may have a step, a number and data (JSON). Entries with a number were written by the
task's run, in order; entries without one by the scripts of the outcome that they describe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

import orjson

from .envelope import DEFAULT_LARGE_LIMIT, plain_data
from .errors import DecryptionError, Refused, TaskEnded, TaskNotFound
from .junk import count_of
from .keys import Partition
from .records import opened_error
from .security.encryption import TaskCipher, event_field, is_encrypted
from .transport.clients import is_denied
from .transport.gateway import Gateway
from .transport.scripts import milliseconds, pairs, queue_script

_DISMISS = queue_script("dismiss")
_READ = queue_script("read_log")

LOG_BYTES: Final = DEFAULT_LARGE_LIMIT
"""Largest size of the events that are read at once; one that is larger alone has a problem in place of its data."""

_PAGE: Final = 200
"""Events of a page."""

_READ_AT_ONCE: Final = 50
"""Events that are read at once: each may be as large as the payload limit."""


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """An event of a task. `at`: milliseconds of Redis' clock since the epoch.

    number: position among the events that runs wrote, from 1. problem: why the data cannot be read, if it cannot.
    task_id: the task of the log. content: the decrypted data of a numbered event, empty without a key.
    """

    id: str
    at: int
    type: str
    step: str | None
    data: Any
    number: int | None = None
    problem: str | None = None
    task_id: str = ""
    content: bytes = b""

    @property
    def restarts(self) -> bool:
        """Whether the task was restarted without its checkpoint: earlier events no longer count."""
        return self.type == "replayed" and isinstance(self.data, dict) and self.data.get("fresh") is True

    def summary(self) -> dict[str, Any]:
        """Return the event as plain data."""
        shown = {"id": self.id, "at": self.at, "type": self.type, "step": self.step, "data": self.data}
        if self.number is not None:
            shown["number"] = self.number
        return shown if self.problem is None else shown | {"problem": self.problem}


async def read_events(
    gateway: Gateway, partition: Partition, task_id: str, *, after: str = "0-0", limit: int = 10_000
) -> list[TaskEvent]:
    """Return events after an event id, oldest first."""
    entries = await _read(gateway, partition, task_id, "XRANGE", (f"({after}", "+"), limit)
    return opened_events(entries, task_id, gateway.encryptor.of(partition, task_id))


async def walk_events(
    gateway: Gateway, partition: Partition, task_id: str, *, after: str = "0-0"
) -> AsyncIterator[TaskEvent]:
    """Yield all events after an event id, oldest first, with one page in memory."""
    while True:
        page = await read_events(gateway, partition, task_id, after=after, limit=_PAGE)
        for event in page:
            yield event
        if len(page) < _PAGE:
            return
        after = page[-1].id


async def read_last_events(
    gateway: Gateway, partition: Partition, task_id: str, limit: int, *, before: str | None = None
) -> list[TaskEvent]:
    """Return the last events, or the last before an event id, newest first."""
    if before == "0-0":  # Redis takes it for no bound
        return []
    newest = "+" if before is None else f"({before}"
    entries = await _read(gateway, partition, task_id, "XREVRANGE", (newest, "-"), limit)
    return opened_events(entries, task_id, gateway.encryptor.of(partition, task_id))


async def _read(
    gateway: Gateway, partition: Partition, task_id: str, command: str, between: tuple[str, str], limit: int
) -> list[tuple[bytes, list[bytes]]]:
    """Return entries of a log, read in parts of a bounded number; and of a bounded size, unless the user may only read.

    Redis demands the right to write a key of each script, so a producer reads the log by plain commands.
    """
    log, found = partition.log(task_id), list[tuple[bytes, list[bytes]]]()
    (first, last), more = between, 1
    while more and len(found) < limit:
        count = min(_READ_AT_ONCE, limit - len(found))
        if _READ.name in gateway.denied:
            page = await gateway.command(command, log, first, last, "COUNT", count)
            more = len(page) == count
        else:
            try:
                page, more = await gateway.run(_READ, [log], [command, first, last, count, LOG_BYTES])
            except Refused as error:
                if not is_denied(error):
                    raise
                gateway.denied.add(_READ.name)
                continue
        found += page
        first = f"({page[-1][0].decode()}" if page else first
    return found


async def dismiss_finding(gateway: Gateway, partition: Partition, task_id: str, number: int) -> None:
    """Log that a person dismissed the finding of a coherence check whose event has this number.

    Raises:
        ValueError: The event is no finding.
        TaskNotFound, TaskEnded
    """
    keys = [partition.record(task_id), partition.log(task_id)]
    answer = b"changed"
    while answer == b"changed":
        replays = await gateway.command("HGET", keys[0], "replays")
        entry, key = await _find_finding(gateway, partition, task_id, number)
        log = orjson.dumps({"event": number, "finding": key})
        answer = await gateway.run(_DISMISS, keys, [log, entry, replays or b""])
    if answer == b"missing":
        raise TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")
    if answer != b"dismissed":
        raise TaskEnded(task_id, answer.decode())


async def find_event(gateway: Gateway, partition: Partition, task_id: str, number: int) -> TaskEvent | None:
    """Return the latest event with a number, or None. The log is read from its end."""
    before = None
    while True:
        page = await read_last_events(gateway, partition, task_id, _PAGE, before=before)
        for event in page:
            if event.number is not None and event.number <= number:
                return event if event.number == number else None
        if len(page) < _PAGE:
            return None
        before = page[-1].id


async def _find_finding(gateway: Gateway, partition: Partition, task_id: str, number: int) -> tuple[str, str]:
    """Return the id of the event of a finding in the log, and the key of the finding. Raises `ValueError`."""
    found = await find_event(gateway, partition, task_id, number)
    if found is not None and found.type == "incoherent":
        data = found.data
        if isinstance(data, dict) and data.get("key"):
            return found.id, str(data["key"])
    raise ValueError(f"event must be that of a finding, got {number}; 'perdure task show {task_id}' lists the findings")


def opened_events(entries: Sequence[tuple[bytes, list[bytes]]], task_id: str, cipher: TaskCipher) -> list[TaskEvent]:
    """Decode and decrypt entries of a log."""
    return [_event(entry_id, pairs(fields), task_id, cipher) for entry_id, fields in entries]


def _event(entry_id: bytes, fields: dict[bytes, bytes], task_id: str, cipher: TaskCipher) -> TaskEvent:
    number, problem = _number(fields.get(b"n"))
    data, content = None, b""
    if (size := fields.get(b"bytes")) is not None:
        problem = f"it was not read: it has {count_of(size):,} bytes, more than the {LOG_BYTES:,} of a read"
    kind = fields.get(b"type", b"?").decode("utf-8", "replace")
    if problem is None:
        data, problem, content = _data(fields.get(b"data"), number, kind, cipher)
    # a run writes the step into its data: beside them, anybody could add one to an entry that is encrypted
    step = fields.get(b"step") if number is None else None
    inner = data.get("step") if isinstance(data, dict) and number is not None else None
    return TaskEvent(
        id=entry_id.decode(),
        at=int(entry_id.partition(b"-")[0]),
        type=kind,
        step=step.decode("utf-8", "replace") if step is not None else inner if isinstance(inner, str) else None,
        data=data,
        number=number,
        problem=problem,
        task_id=task_id,
        content=content,
    )


def _number(text: bytes | None) -> tuple[int | None, str | None]:
    if text is None:
        return None, None
    if text.isdigit() and len(text) <= _DIGITS:
        return int(text), None
    return None, f"number must be decimal digits, got {text[:40]!r}"


_DIGITS: Final = 15
"""Digits of the largest number: Lua compares numbers as doubles, which are exact up to there."""


def _data(data: bytes | None, number: int | None, kind: str, cipher: TaskCipher) -> tuple[Any, str | None, bytes]:
    """Return the data of an event, or why it cannot be read; and its decrypted bytes. A broken event hides no other."""
    try:
        if number is not None and (data or not cipher.accepts_plain):
            content = cipher.decrypt(event_field(number, kind), data or b"")
            return plain_data(content), None, content if cipher.encrypts else b""
        if not data:
            return None, None, b""
        return opened_error(cipher, data) if is_encrypted(data) else plain_data(data), None, b""
    except DecryptionError as error:
        return None, str(error), b""
    except ValueError as error:
        return None, f"not JSON: {error}", b""


LATEST_EVENTS: Final = 200
"""Events of a log tail."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The tail of an event log, and what else is stored of the task.

    Attributes:
        events: The last events, oldest first, none from before a fresh start.
        number: Number of the last event that a run wrote.
        now: Milliseconds of Redis' clock.
        unread: Messages in the inbox.
        done: Keys of recorded steps.
        intents: Decrypted intents of steps that were about to act, by key; empty if one cannot be decrypted.
        saved: Decrypted progress under names that start with `#`, as far as it can be decrypted.
    """

    events: tuple[TaskEvent, ...]
    number: int
    now: int
    unread: int
    done: Collection[str] = ()
    intents: Mapping[str, bytes] = field(default_factory=dict)
    saved: Mapping[str, bytes] = field(default_factory=dict)


async def read_log_tail(
    gateway: Gateway, partition: Partition, task_id: str, limit: int = LATEST_EVENTS, *, checkpoint: bool = True
) -> LogTail:
    """Read the tail of a task's log. The task may be running. checkpoint: whether to read the checkpoint as well."""
    record = partition.record(task_id)
    (number, (sent, used), time, *names), entries = await asyncio.gather(  # in one round trip
        gateway.pipeline(
            [
                ("HGET", record, "events"),
                ("HMGET", partition.inbox(task_id), "sent", "used"),
                ("TIME",),
                *([("HKEYS", partition.steps(task_id))] if checkpoint else []),
            ],
            node_of=record,
        ),
        _read(gateway, partition, task_id, "XREVRANGE", ("+", "-"), limit),
    )
    cipher = gateway.encryptor.of(partition, task_id)
    events = takewhile(lambda event: not event.restarts, opened_events(entries, task_id, cipher))
    tail = LogTail(
        events=tuple(reversed([*events])),
        number=count_of(number),
        now=milliseconds(time),
        unread=max(0, count_of(sent) - count_of(used)),
    )
    return await _with_checkpoint(tail, gateway, partition, task_id, names[0]) if checkpoint else tail


async def _with_checkpoint(
    tail: LogTail, gateway: Gateway, partition: Partition, task_id: str, names: Sequence[bytes]
) -> LogTail:
    """Return the tail with the checkpoint whose fields have these names."""
    read = [name for name in names if name.startswith((b"s:#", b"i:"))]
    values = await gateway.command("HMGET", partition.steps(task_id), *read) if read else []
    cipher = gateway.encryptor.of(partition, task_id)
    saved: dict[str, bytes] = {}
    intents: dict[str, bytes] = {}
    for field_name, value in zip(read, values, strict=True):
        name = field_name.decode("utf-8", "replace")
        kind, _, key = name.partition(":")
        try:
            data = None if value is None else cipher.decrypt(name, value)
        except DecryptionError:
            data = b"" if kind == "i" else None
        if data is not None:
            (intents if kind == "i" else saved)[key] = data
    return replace(
        tail,
        done=frozenset(name.decode("utf-8", "replace").removeprefix("d:") for name in names if name.startswith(b"d:")),
        intents=intents,
        saved=saved,
    )
