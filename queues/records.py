"""The task record, read from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from .envelope import plain_data, readable_envelope
from .errors import DecryptionError, LargeValueLost, Refused, UnreadableRecord
from .junk import count_of, shown_bytes
from .keys import GROUP, Partition, is_reserved
from .security.encryption import ERROR, NO_CIPHER, PROGRESS, RESULT, TaskCipher, arguments_field
from .security.secret_arguments import SecretPaths, mask, read_secret_paths
from .transport.clients import is_missing_group
from .transport.gateway import Gateway
from .transport.large_values import LargeValue
from .transport.pipelining import Command
from .transport.scripts import pairs
from .wording import iso_time


class State(StrEnum):
    """State of a task."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    """Parked: stored as `scheduled`, with what it waits for."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether the task has ended. A dead one may be replayed."""
        return self in (State.SUCCEEDED, State.DEAD, State.CANCELLED)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress that a handler has reported with `ctx.progress`. at: milliseconds of Redis' clock.

    total: None if the handler does not know it.
    """

    done: float
    total: float | None
    note: str
    at: int

    @property
    def share(self) -> float | None:
        """Share that is done, from 0 to 1; None without a total."""
        return None if self.total is None else min(1.0, self.done / self.total)

    def summary(self) -> dict[str, Any]:
        """Return the progress as plain data, its time as ISO 8601."""
        return {"done": self.done, "total": self.total, "note": self.note, "at": iso_time(self.at)}


@dataclass(frozen=True, slots=True)
class Record:
    """A task at the time of the read. Times are milliseconds of Redis' clock since the epoch.

    Attributes:
        app: Name of the app whose workers run it; None if any app with a task of this name may.
        args, result: As they are stored, possibly encrypted. `shown_arguments` and `shown_result` are for display.
        worker: Worker that runs it, or ran it last.
        started_at: Start of the current run. None before its first heartbeat.
        step, step_at: Step that the run was in at its last heartbeat, and its start.
        alive_at: Last heartbeat of the run.
        holder, idle_ms, deliveries: Consumer that has its message, which may be no worker (see keys.py), the time since
            that got it or renewed its lease, and how often the message was handed out.
        max_attempts: The producer's limit of attempts; None if the task's holds.
        queued_at: Time since which its message has been in the queue; None if it has none.
        waits: What the task waits for while it is parked, such as "message".
        reported, reported_at: Progress that its handler reported last, possibly encrypted, and when; see `progress`.
        unused: Upper bound of the messages in its inbox. Of a task that has succeeded: those that it left unread.
        handed_to: Id of its successor.
        secrets: Paths of its secret arguments, as its producer marked them.
        masked: Further paths that are masked for display, since the definition of the task marks them.
        problem: Why the record cannot be read; then only its key and perhaps its state are known.
    """

    id: str
    queue: str
    partition: int
    state: State
    task: str | None
    args: bytes | None
    headers: Mapping[str, str]
    attempts: int
    crashes: int
    replays: int
    enqueued_at: int | None
    due_at: int | None
    finished_at: int | None
    ran_ms: int | None
    worker: str | None
    step: str | None
    alive_at: int | None
    result: bytes | None
    reason: str | None
    error: Mapping[str, Any] | None
    started_at: int | None = None
    step_at: int | None = None
    holder: str | None = None
    idle_ms: int | None = None
    deliveries: int = 0
    waits: str | None = None
    max_attempts: int | None = None
    queued_at: int | None = None
    reported: bytes | None = field(default=None, repr=False)
    reported_at: int | None = None
    unused: int = 0
    handed_to: str | None = None
    problem: str | None = None
    secrets: SecretPaths = ()
    masked: SecretPaths = field(default=(), repr=False)
    key: str | None = None
    tags: Sequence[str] = ()
    app: str | None = None
    cipher: TaskCipher = field(default=NO_CIPHER, repr=False, compare=False)

    def shown_arguments(self) -> bytes | None:
        """Return the arguments as JSON with masked secrets, or why they cannot be decrypted."""
        return shown_arguments(self.cipher, self.task, self.args, self.secrets, self.masked)

    def shown_result(self) -> bytes | None:
        """Return the result as JSON, the size of a large one, or why it cannot be read."""
        if self.result is None:
            return None
        try:
            data = self.cipher.decrypt(RESULT, self.result, plain=True)
            large = LargeValue.decode(data)
            return data if large is None else large.shown.encode()
        except (DecryptionError, LargeValueLost) as error:
            return f"({error})".encode()

    def progress(self) -> Progress | None:
        """Return the progress that the handler reported last, None if it has not. Raises `DecryptionError`."""
        if self.reported is None:
            return None
        found = orjson.loads(self.cipher.decrypt(PROGRESS, self.reported))
        return Progress(found["done"], found["total"], found["note"], self.reported_at or 0)

    def shown_progress(self) -> Progress | None:
        """Return the progress for display: a note says why it cannot be read."""
        try:
            return self.progress()
        except (DecryptionError, LookupError, TypeError, ValueError) as error:
            return Progress(0, None, f"({error})", self.reported_at or 0)

    def summary(self) -> dict[str, Any]:
        """Return the record as plain data, times as ISO 8601."""
        shown: dict[str, Any] = {
            "id": self.id,
            "queue": self.queue,
            "partition": self.partition,
            "state": str(self.state),
            "task": self.task,
            "app": self.app,
            "args": _json_or_text(self.shown_arguments()),
            "headers": dict(self.headers),
            "attempts": self.attempts,
            "crashes": self.crashes,
            "replays": self.replays,
            "enqueued_at": iso_time(self.enqueued_at),
            "due_at": iso_time(self.due_at),
            "finished_at": iso_time(self.finished_at),
            "ran_ms": self.ran_ms,
            "worker": self.worker,
            "started_at": iso_time(self.started_at),
            "alive_at": iso_time(self.alive_at),
            "step": self.step,
            "step_at": iso_time(self.step_at),
            "reason": self.reason,
            "error": self.error,
        }
        if (progress := self.shown_progress()) is not None:
            shown["progress"] = progress.summary()
        more = {"waits": self.waits, "handed_to": self.handed_to, "unused": self.unused, "key": self.key}
        if self.problem is not None:
            shown["problem"] = self.problem
        return shown | {name: value for name, value in (more | {"tags": list(self.tags)}).items() if value}


def shown_arguments(
    cipher: TaskCipher, task: str | None, data: bytes | None, secrets: SecretPaths, masked: SecretPaths = ()
) -> bytes | None:
    """Return arguments for display: with masked secrets, the size of large ones, or why they cannot be read.

    masked: paths that are masked too, and are not those of the envelope.
    """
    if data is None:
        return None
    try:
        if (large := LargeValue.decode(data)) is not None:
            return large.shown.encode()
        return mask(cipher.decrypt(arguments_field(task or "?", secrets), data, plain=True), (*secrets, *masked))
    except (DecryptionError, LargeValueLost) as error:
        return f"({error})".encode()


def opened_error(cipher: TaskCipher, data: bytes) -> Any:
    """Return the evidence of an error, or evidence of why it cannot be decrypted."""
    try:
        return _json_or_text(cipher.decrypt(ERROR, data, plain=True))
    except DecryptionError as error:
        return {"error": type(error).__name__, "message": str(error), "traceback": ""}


def opened_evidence(cipher: TaskCipher, data: bytes) -> dict[str, Any]:
    """Return the evidence of an error. What another program stored in its place is the message."""
    found = opened_error(cipher, data)
    return found if isinstance(found, dict) else {"error": "?", "message": "" if found is None else str(found)}


_FIELDS: Final = (
    *(b"state", b"entry", b"dead", b"env", b"args", b"task", b"app", b"at", b"finished"),
    *(b"attempts", b"crashes", b"replays", b"ran", b"worker"),
    *(b"run", b"began", b"alive", b"step", b"step_at"),
    *(b"result", b"reason", b"error", b"waits", b"handed_to"),
    *(b"progress", b"progress_at", b"unread"),
)
"""Fields that are read."""

_OF_A_RUN: Final = (b"run", b"began", b"alive", b"step", b"step_at")
"""Fields of one run, by its delivery count: heartbeats store them."""


async def read_record(gateway: Gateway, partition: Partition, task_id: str) -> Record | None:
    """Return the task's record, or None."""
    return (await read_records(gateway, partition, [task_id]))[0]


async def read_records(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> list[Record | None]:
    """Return the records of tasks of one partition, in the order of the ids, in two round trips."""
    raw = await gateway.pipeline([("HMGET", partition.record(task_id), *_FIELDS) for task_id in task_ids])
    hashes = [{name: value for name, value in zip(_FIELDS, one, strict=True) if value is not None} for one in raw]
    places = await _read_places(gateway, partition, task_ids, hashes)
    found: list[Record | None] = []
    for task_id, fields, place in zip(task_ids, hashes, places, strict=True):
        try:
            cipher = gateway.encryptor.of(partition, task_id)
            found.append(_record(partition, task_id, fields, place, cipher) if fields else None)
        except ValueError as error:
            raise UnreadableRecord(partition.record(task_id), str(error)) from None
    return found


@dataclass(slots=True)
class _Place:
    """State of a task that other keys hold: its stream entry, its pending entry, its due time, its inbox."""

    fields: Mapping[bytes, bytes] = field(default_factory=dict)
    holder: str | None = None
    idle: int | None = None
    count: int = 0
    due: int | None = None
    unused: int = 0


_ENDED: Final = (b"succeeded", b"cancelled")


async def _read_places(
    gateway: Gateway, partition: Partition, task_ids: Sequence[str], hashes: Sequence[Mapping[bytes, bytes]]
) -> list[_Place]:
    """Return what other keys hold of each task, in one round trip; nothing of tasks that have ended."""
    places = [_Place() for _ in hashes]
    live = [
        (task_id, fields, place)
        for task_id, fields, place in zip(task_ids, hashes, places, strict=True)
        if fields and fields.get(b"state") not in _ENDED
    ]
    reads: list[tuple[Command, Callable[[_Place, Any], None], _Place]] = []
    owners: list[tuple[Command, Callable[[_Place, Any], None], _Place]] = []
    for task_id, fields, place in live:
        reads.append((("HMGET", partition.inbox(task_id), "sent", "used"), _set_unused, place))
        if fields.get(b"state") == b"scheduled":
            reads.append((("ZSCORE", partition.due, task_id), _set_due, place))
        for name, stream in ((b"entry", partition.ready), (b"dead", partition.dead)):
            if (entry := fields.get(name)) is not None:
                reads.append((("XRANGE", stream, entry, entry), _set_fields, place))
                if stream == partition.ready:
                    owners.append((("XPENDING", stream, GROUP, entry, entry, 1), _set_holder, place))
                break
    try:
        replies = await gateway.pipeline([command for command, _, _ in (*reads, *owners)])
    except Refused as error:
        if not is_missing_group(error):
            raise
        owners = []  # no worker has come yet: no message is pending
        replies = await gateway.pipeline([command for command, _, _ in reads])
    for (command, apply, place), reply in zip((*reads, *owners), replies, strict=True):
        try:
            apply(place, reply)
        except ValueError as error:
            raise UnreadableRecord(str(command[1]), str(error)) from None
    return places


def _set_unused(place: _Place, reply: Sequence[bytes | None]) -> None:
    sent, used = map(count_of, reply)
    place.unused = max(0, sent - used)


def _set_due(place: _Place, score: bytes | None) -> None:
    due = math.nan if score is None else float(score)
    place.due = int(due) if math.isfinite(due) else None


def _set_fields(place: _Place, entries: Sequence[Any]) -> None:
    place.fields = pairs(entries[0][1]) if entries else {}


def _set_holder(place: _Place, pending: Sequence[Any]) -> None:
    for _, holder, idle, count in pending:
        place.holder, place.idle, place.count = holder.decode(), int(idle), int(count)


def _record(
    partition: Partition, task_id: str, fields: Mapping[bytes, bytes], place: _Place, cipher: TaskCipher
) -> Record:
    payload = {**fields, **place.fields}
    envelope = readable_envelope(payload.get(b"env"))
    state = State(fields.get(b"state", b"queued").decode())
    owner = None if place.holder is None or is_reserved(place.holder) else place.holder
    if state is State.QUEUED and owner is not None:
        state = State.RUNNING
    elif state is State.SCHEDULED and b"waits" in fields:
        state = State.WAITING
    if _number(fields, b"run") not in (None, place.count):  # of a run whose lease has passed
        fields = {name: value for name, value in fields.items() if name not in _OF_A_RUN}
    at = _number(fields, b"at")
    if at is None and b"entry" in fields:
        at = int(fields[b"entry"].partition(b"-")[0])
    return Record(
        id=task_id,
        queue=partition.queue,
        partition=partition.index,
        state=state,
        task=envelope.task if envelope else _text(fields, b"task"),
        args=payload.get(b"args"),
        headers=envelope.headers if envelope else {},
        attempts=_number(fields, b"attempts") or 0,
        crashes=_number(fields, b"crashes") or 0,
        replays=_number(fields, b"replays") or 0,
        enqueued_at=at,
        due_at=place.due,
        finished_at=_number(fields, b"finished"),
        ran_ms=_number(fields, b"ran"),
        worker=owner or _text(fields, b"worker"),
        step=_text(fields, b"step"),
        alive_at=_number(fields, b"alive"),
        result=fields.get(b"result"),
        reason=_text(fields, b"reason"),
        error=opened_evidence(cipher, fields[b"error"])
        if b"error" in fields and state is not State.SUCCEEDED
        else None,
        started_at=_number(fields, b"began"),
        step_at=_number(fields, b"step_at"),
        holder=place.holder,
        idle_ms=place.idle,
        deliveries=place.count,
        reported=fields.get(b"progress"),
        reported_at=_number(fields, b"progress_at"),
        max_attempts=envelope.options.max_attempts if envelope else None,
        queued_at=int(fields[b"entry"].partition(b"-")[0]) if b"entry" in fields else None,
        waits=_text(fields, b"waits") if state is State.WAITING else None,
        handed_to=_text(fields, b"handed_to"),
        unused=place.unused or _number(fields, b"unread") or 0,
        secrets=envelope.secrets if envelope else read_secret_paths(payload.get(b"env", b"")),
        key=envelope.key if envelope else None,
        app=envelope.app if envelope else _text(fields, b"app"),
        tags=envelope.tags if envelope else (),
        cipher=cipher,
    )


def number_of(key: str, name: str, value: bytes | None, *remedy: str) -> int:
    """Return a field of a record, 0 if it is missing. Raises `UnreadableRecord`."""
    try:
        return int(value or 0)
    except ValueError:
        raise UnreadableRecord(key, f"{name} must be a number, got {shown_bytes(value or b'')}", *remedy) from None


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = fields.get(name)
    try:
        return None if value is None else int(float(value))
    except (ValueError, OverflowError):
        raise ValueError(f"{name.decode()} must be a number, got {shown_bytes(value or b'')}") from None


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = fields.get(name)
    return None if value is None else value.decode("utf-8", "replace")


def _json_or_text(data: bytes | None) -> Any:
    if not data:
        return None
    try:
        return plain_data(data)
    except ValueError:
        return data.decode("utf-8", "replace")
