"""The task record, read from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from .defaults import MAX_SECONDS
from .envelope import readable_envelope, shown_data
from .errors import DecryptionError, LargeValueLost, QueueError, Refused, UnreadableRecord
from .junk import count_of, is_entry_id, shown_bytes
from .keys import GROUP, Partition, is_reserved, tenant_of
from .lanes import lane_of
from .security.encryption import ERROR, NO_CIPHER, PROGRESS, RESULT, TaskCipher, arguments_field, is_encrypted
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
    LIMITED = "limited"
    """In the waiting list of its limits."""
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
        due_at: Time at which it runs next if nothing else comes first; None if it waits without a time limit.
        args, result: As they are stored, possibly encrypted. `shown_arguments` and `shown_result` are for display.
        worker: Worker that runs it, or ran it last.
        started_at: Start of the current run. None before its first heartbeat.
        step, step_at: Step that the run was in at its last heartbeat, and its start.
        alive_at: Last heartbeat of the run.
        holder, idle_ms, deliveries: Consumer that has its message, which may be no worker (see keys.py), the time since
            that got it or renewed its lease, and how often the message was handed out.
        max_attempts: The producer's limit of attempts; None if the task's holds.
        queued_at: Time since which its message has been in the queue; None if it has none.
        waits: What the task waits for while it is parked, such as "message", or in the waiting list of a limit.
        paused_by: Number of the pause that holds it, if it is scheduled; see pauses.py.
        reported, reported_at: Progress that its handler reported last, possibly encrypted, and when; see `progress`.
        unused: Upper bound of the messages in its inbox. Of a task that has succeeded: those that it left unread.
        unused_answers: Answers that came early, and that no wait had used when the task ended.
        handed_to: Id of its successor.
        replaced_by: Id of the task of its unique key or limit for which it was cancelled.
        dropped: Name of the limit that had no room for it, for which it was cancelled.
        secrets: Paths of its secret arguments, as its producer marked them.
        masked: Further paths that are masked for display, since the definition of the task marks them.
        problem: Why the record cannot be read; then only its key and perhaps its state are known.
        crash: Evidence of the last crash that a supervisor reported.
        returned: Deliveries of the message that ended without an outcome and without a crash.
    """

    id: str
    queue: str
    partition: int
    state: State
    task: str | None = None
    args: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0
    crashes: int = 0
    replays: int = 0
    enqueued_at: int | None = None
    due_at: int | None = None
    finished_at: int | None = None
    ran_ms: int | None = None
    worker: str | None = None
    step: str | None = None
    alive_at: int | None = None
    result: bytes | None = None
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    started_at: int | None = None
    step_at: int | None = None
    holder: str | None = None
    idle_ms: int | None = None
    deliveries: int = 0
    waits: str | None = None
    paused_by: int | None = None
    max_attempts: int | None = None
    queued_at: int | None = None
    reported: bytes | None = field(default=None, repr=False)
    reported_at: int | None = None
    unused: int = 0
    unused_answers: int = 0
    handed_to: str | None = None
    replaced_by: str | None = None
    dropped: str | None = None
    problem: str | None = None
    secrets: SecretPaths = ()
    masked: SecretPaths = field(default=(), repr=False)
    key: str | None = None
    tags: Sequence[str] = ()
    app: str | None = None
    crash: Mapping[str, Any] = field(default_factory=dict, repr=False)
    returned: int = 0
    cipher: TaskCipher = field(default=NO_CIPHER, repr=False, compare=False)

    @property
    def tenant(self) -> str | None:
        """The tenant that the task belongs to; None without one."""
        return tenant_of(self.id)

    def shown_arguments(self) -> bytes | None:
        """Return the arguments as JSON with masked secrets, or why they cannot be decrypted."""
        return shown_arguments(self.cipher, self.task, self.args, self.secrets, self.masked)

    def shown_result(self) -> bytes | None:
        """Return the result as JSON, the size of a large one, or why it cannot be read."""
        if self.result is None:
            return None
        try:
            data = self.cipher.decrypt(RESULT, self.result)
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
            "lane": lane_of(self.partition),
            "state": str(self.state),
            "task": self.task,
            "app": self.app,
            "args": shown_data(self.shown_arguments()),
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
        more |= {"unused_answers": self.unused_answers, "replaced_by": self.replaced_by}
        more |= {"dropped": self.dropped, "tenant": self.tenant}
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
        return mask(cipher.decrypt(arguments_field(task or "?", secrets), data), (*secrets, *masked))
    except (DecryptionError, LargeValueLost) as error:
        return f"({error})".encode()


UNPROVEN: Final = "(not encrypted)"
"""Mark of a plain text where encryption is required: any client of Redis may have written it."""


def opened_error(cipher: TaskCipher, data: bytes) -> Any:
    """Return the evidence of an error, or evidence of why it cannot be decrypted.

    Scripts and processes without a key store plain evidence. Where encryption is required, it is marked.
    """
    if not is_encrypted(data) and not cipher.accepts_plain:
        found = shown_data(data)
        return {**found, "message": f"{UNPROVEN} {found.get('message', '')}"} if isinstance(found, dict) else found
    try:
        return shown_data(cipher.decrypt(ERROR, data))
    except DecryptionError as error:
        return {"error": type(error).__name__, "message": str(error), "traceback": ""}


def opened_evidence(cipher: TaskCipher, data: bytes) -> dict[str, Any]:
    """Return the evidence of an error. What another program stored in its place is the message."""
    found = opened_error(cipher, data)
    return found if isinstance(found, dict) else {"error": "?", "message": "" if found is None else str(found)}


def crash_evidence(data: bytes | None) -> Mapping[str, Any]:
    """Return the stored evidence of a crash, nothing if it is damaged."""
    try:
        found = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


_FIELDS: Final = (
    *(b"state", b"entry", b"dead", b"env", b"args", b"task", b"app", b"at", b"finished"),
    *(b"attempts", b"crashes", b"replays", b"ran", b"worker"),
    *(b"run", b"began", b"alive", b"step", b"step_at"),
    *(b"result", b"reason", b"error", b"waits", b"wakes", b"handed_to"),
    *(b"progress", b"progress_at", b"unread", b"unused_answers", b"crash", b"returned", b"replaced_by"),
    *(b"dropped", b"gate"),
)
"""Fields that are read."""

_OF_A_RUN: Final = (b"run", b"began", b"alive", b"step", b"step_at")
"""Fields of one run, by its delivery count: heartbeats store them."""

_NEVER: Final = MAX_SECONDS * 500
"""Due times after this one, in milliseconds, belong to waits without a time limit: they last for `MAX_SECONDS`."""


async def read_record(gateway: Gateway, partition: Partition, task_id: str) -> Record | None:
    """Return the task's record, or None. Raises `UnreadableRecord`."""
    (row,) = await _read(gateway, partition, [task_id])
    if row.error is not None:
        raise row.error
    return row.record


async def read_tasks(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> list[Record | None]:
    """Return the tasks of one partition, in the order of the ids, in two round trips.

    One that cannot be read is a row with its `problem`, and hides no other task.
    """
    rows = await _read(gateway, partition, task_ids)
    return [
        row.record if row.error is None else _damaged(partition, task_id, row.fields, row.error)
        for task_id, row in zip(task_ids, rows, strict=True)
    ]


def _damaged(partition: Partition, task_id: str, fields: Mapping[bytes, bytes], error: QueueError) -> Record:
    problem = str(error)
    if not isinstance(error, UnreadableRecord):
        problem = f"could not read {partition.record(task_id)} and the keys beside it: {problem}"
    state = fields.get(b"state", b"").decode("utf-8", "replace")
    known = State(state) if state in set(State) else State.QUEUED
    return Record(task_id, partition.queue, partition.index, known, problem=problem)


@dataclass(slots=True)
class _Row:
    """Stored state of a task: its record, and its stream entry, pending entry, due time and inbox."""

    fields: Mapping[bytes, bytes]
    entry: Mapping[bytes, bytes] = field(default_factory=dict)
    holder: str | None = None
    idle: int | None = None
    count: int = 0
    due: int | None = None
    unused: int = 0
    record: Record | None = None
    error: QueueError | None = None
    """Why it cannot be read."""


_ENDED: Final = (b"succeeded", b"cancelled")


async def _read(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> list[_Row]:
    """Return the row of each task. Of one that has ended, only the record is read."""
    stored = await gateway.pipeline_each([("HMGET", partition.record(task_id), *_FIELDS) for task_id in task_ids])
    rows = [_Row({}, error=reply) if isinstance(reply, Refused) else _Row(_known(reply)) for reply in stored]
    reads: list[tuple[_Row, Callable[[_Row, Any], None], Command]] = []
    for task_id, row in zip(task_ids, rows, strict=True):
        if row.fields and row.fields.get(b"state") not in _ENDED:
            reads += [(row, *read) for read in _reads(partition, task_id, row.fields)]
    replies = await gateway.pipeline_each([command for _, _, command in reads])
    for (row, apply, command), reply in zip(reads, replies, strict=True):
        try:
            if not isinstance(reply, Refused):
                apply(row, reply)
            elif not is_missing_group(reply):  # no worker has come yet: no message is pending
                row.error = reply
        except ValueError as error:
            row.error = UnreadableRecord(str(command[1]), str(error))
    for task_id, row in zip(task_ids, rows, strict=True):
        try:
            if row.fields and row.error is None:
                row.record = _record(partition, task_id, row, gateway.encryptor.of(partition, task_id))
        except (LookupError, TypeError, ValueError) as error:
            row.error = UnreadableRecord(partition.record(task_id), str(error))
    return rows


def _known(values: Sequence[bytes | None]) -> dict[bytes, bytes]:
    return {name: value for name, value in zip(_FIELDS, values, strict=True) if value is not None}


def _reads(
    partition: Partition, task_id: str, fields: Mapping[bytes, bytes]
) -> Iterator[tuple[Callable[[_Row, Any], None], Command]]:
    """Yield the reads of what other keys hold of a task."""
    yield _set_unused, ("HMGET", partition.inbox(task_id), "sent", "used")
    if fields.get(b"state") == b"scheduled":
        yield _set_due, ("ZSCORE", partition.due, task_id)
    if (entry := fields.get(b"entry")) is not None and is_entry_id(entry):
        yield _set_entry, ("XRANGE", partition.ready, entry, entry)
        yield _set_holder, ("XPENDING", partition.ready, GROUP, entry, entry, 1)
    elif (entry := fields.get(b"dead")) is not None and is_entry_id(entry):
        yield _set_entry, ("XRANGE", partition.dead, entry, entry)


def _set_unused(row: _Row, reply: Sequence[bytes | None]) -> None:
    sent, used = map(count_of, reply)
    row.unused = max(0, sent - used)


def _set_due(row: _Row, score: bytes | None) -> None:
    due = math.nan if score is None else float(score)
    row.due = int(due) if math.isfinite(due) else None


def _set_entry(row: _Row, entries: Sequence[Any]) -> None:
    row.entry = pairs(entries[0][1]) if entries else {}


def _set_holder(row: _Row, pending: Sequence[Any]) -> None:
    for _, holder, idle, count in pending:
        row.holder, row.idle, row.count = holder.decode(), int(idle), int(count)


def _record(partition: Partition, task_id: str, row: _Row, cipher: TaskCipher) -> Record:
    fields = row.fields
    payload = {**fields, **row.entry}
    envelope = readable_envelope(payload.get(b"env"))
    state = State(fields.get(b"state", b"queued").decode())
    owner = None if row.holder is None or is_reserved(row.holder) else row.holder
    if state is State.QUEUED and owner is not None:
        state = State.RUNNING
    elif state is State.SCHEDULED and b"waits" in fields:
        state = State.WAITING
    if _number(fields, b"run") not in (None, row.count):  # of a run whose lease has passed
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
        due_at=None if row.due is not None and row.due > _NEVER else row.due,
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
        holder=row.holder,
        idle_ms=row.idle,
        deliveries=row.count,
        reported=fields.get(b"progress"),
        reported_at=_number(fields, b"progress_at"),
        max_attempts=envelope.options.max_attempts if envelope else None,
        queued_at=int(fields[b"entry"].partition(b"-")[0]) if b"entry" in fields else None,
        waits=_waits(fields, state),
        paused_by=_paused_by(fields, state),
        handed_to=_text(fields, b"handed_to"),
        replaced_by=_text(fields, b"replaced_by"),
        dropped=_text(fields, b"dropped"),
        unused=row.unused or _number(fields, b"unread") or 0,
        unused_answers=_number(fields, b"unused_answers") or 0,
        secrets=envelope.secrets if envelope else read_secret_paths(payload.get(b"env", b"")),
        key=envelope.key if envelope else None,
        app=envelope.app if envelope else _text(fields, b"app"),
        tags=envelope.tags if envelope else (),
        crash=crash_evidence(fields.get(b"crash")),
        returned=_number(fields, b"returned") or 0,
        cipher=cipher,
    )


def _waits(fields: Mapping[bytes, bytes], state: State) -> str | None:
    """Return what a task waits for. In a waiting list, the second word of its field `gate` names the limits."""
    if state is not State.LIMITED:
        return _text(fields, b"waits") if state is State.WAITING else None
    words = fields.get(b"gate", b"").split(b" ")
    return f"limit {words[1].decode('utf-8', 'replace').replace(',', ', ')}" if len(words) == 3 else None


def _paused_by(fields: Mapping[bytes, bytes], state: State) -> int | None:
    """Return the number of the pause that holds a scheduled task; None without one. See await_resume.lua."""
    kind, _, number = fields.get(b"wakes", b"").partition(b":")
    return count_of(number) if state is State.SCHEDULED and kind == b"pause" else None


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
