"""The checkpoint of a task in Redis: step records by key, whose content this package does not interpret."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..envelope import DEFAULT_LARGE_LIMIT
from ..errors import UnreadableCheckpoint, UnreadableRecord, WrongType
from ..event_log import LOG_BYTES, TaskEvent, opened_events, read_last_events
from ..junk import shown_bytes
from ..keys import DATA_FORMAT, GROUP, RESERVED, Partition
from ..partitions.route import registered_retention
from ..records import State, crash_evidence, number_of
from ..security.encryption import PROGRESS, TaskCipher, event_field
from ..stream_items import field_of_place, stream_names, stream_of_place
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import milliseconds, pairs, queue_script
from .leases import Delivery, check_accepted
from .quarantine_store import CRASH_WINDOW_MS
from .settlement import Counters
from .step_pages import MAX_COUNTED, NO_CHUNKS, PAGE, PAGE_BYTES, StepPages, add_fields

if TYPE_CHECKING:
    from ..security.hash_chain import HashChain

_WRITE = queue_script("write_checkpoint")
_LOAD = queue_script("load_history")


class Kind(StrEnum):
    """Kind of a write into the checkpoint."""

    DONE = "done"
    INTENT = "intent"
    """The step is about to act. An empty value deletes the intent."""
    SAVED = "saved"
    DONE_WITH_EVENT = "mark"
    """The step is done, and an event of its own is logged with it."""
    EVENT = "event"
    """An entry of the event log: `step` is its type, `value` its number, `log` its data."""
    BASE = "base"
    """An event that has the whole state: the log before the former event of this kind is deleted."""
    DROP = "drop"
    """Delete what is stored of the step: it is part of something larger that is recorded in the same script. `value`:
    digest and number of its chunks, if it has any."""
    CHUNK = "chunk"
    """A chunk of a large step result: `step` is its name, `DIGEST:NUMBER`. The record that refers to it comes later.
    An empty value deletes it."""
    RESULT_CHUNK = "part"
    """A chunk of the task's large result: `step` is its number."""
    CONSUMED = "taken"
    """A message of the inbox was used: `step` is its number there."""
    WAIT = "wait"
    """A wait is opened, or opened again without the answer that it has: `step` is its id, `log` its limits."""
    WAIT_CLOSED = "answered"
    """A wait is closed: `step` is its id, `value` the digest of its answer's id, empty without an answer."""
    VALUE = "value"
    """A named value of the task is set: `step` is its name, `log` its age in milliseconds."""
    TRANSFERRED = "moved"
    """The task has a successor, which gets the messages from now on: `value` is its id."""
    EMITTED = "emitted"
    """An item of a stream: `step` is its place (`item_place`, `keyed_place`), `value` its JSON."""
    CUT_OFF = "cut"
    """A mark in a stream: items of a unit are void. `step` is its place (`mark_place`)."""
    EMITTING = "emits"
    """The note of what a unit has emitted: `step` is the unit, `value` the note. An empty value deletes it."""
    PROGRESS = "progress"
    """The progress that the handler reports: `value` replaces the last one."""
    EXCUSE = "excuse"
    """The entries stored with it are progress, which excuses the crashes before it: see `History.excuse`."""


class Entry(NamedTuple):
    """One write into the checkpoint. log: JSON data of the event that a DONE or an EVENT logs."""

    kind: Kind
    step: str
    value: bytes
    log: bytes = b"{}"

    def encrypted(self, cipher: TaskCipher) -> Entry:
        """Return the entry as it is stored. Call it once: if the entry is written again, it must be the same."""
        if self.kind is Kind.EVENT or self.kind is Kind.BASE:
            return self._replace(log=cipher.encrypt(event_field(int(self.value), self.step), self.log))
        if self.kind is Kind.PROGRESS:
            return self._replace(value=cipher.encrypt(PROGRESS, self.value))
        if self.kind is Kind.EMITTED:
            return self._replace(value=cipher.encrypt(field_of_place(self.step), self.value))
        if self.kind not in _FIELD_PREFIX or (self.kind in _DELETED_EMPTY and not self.value):
            return self
        return self._replace(value=cipher.encrypt(f"{_FIELD_PREFIX[self.kind]}:{self.step}", self.value))


_FIELD_PREFIX = {
    Kind.DONE: "d",
    Kind.DONE_WITH_EVENT: "d",
    Kind.INTENT: "i",
    Kind.SAVED: "s",
    Kind.EMITTING: "e",
    Kind.WAIT: "wait",
    Kind.VALUE: "value",
}
"""Prefixes of the fields of a step hash, and of the kinds as which waits and values are encrypted."""

_DELETED_EMPTY: Final = frozenset({Kind.INTENT, Kind.EMITTING})
"""Kinds of which an empty value deletes the field."""

_STREAMS: Final = frozenset({Kind.EMITTED, Kind.CUT_OFF})
_MORE_KEYS: Final = _STREAMS | {Kind.WAIT, Kind.WAIT_CLOSED}
"""Kinds whose write names the index of open waits as well; one with items also names their streams."""


@dataclass(slots=True)
class History:
    """State that earlier runs of a task left.

    Attributes:
        done: Step records, by key. saved: progress within steps.
        intents: Risky steps that were about to act, and notes of tool calls in flight.
        emitted: Notes of what units have emitted that are not recorded, and of what the body of the handler has.
        streams: Names of the streams into which the task has emitted.
        pages: Reads the rest of these, if the checkpoint is large.
        entries: Number of the last entry that a run wrote.
        events: Number of the last event that a run logged.
        replays: How often a dead letter of the task was replayed.
        lost: Deliveries of the present message that ended without an outcome and were not returned.
        mail: Number of the last message that was sent to the task's inbox.
        quarantined: Whether the task was put into quarantine and has not survived the probation time since.
        excused_crashes: Crashes that were followed by progress.
        recent_crashes: Those of them that are within the window.
        enqueued: Time of the first enqueue in milliseconds; None if it is the time of the message.
        crash: Evidence of the last crash.
        latest: The last events of the log, newest first.
        handed_from: Source of a successor: the task that it continues, and a token.
        continued: Source of this task's successor, noted once a worker has read that one.
        alive_at: Time of the last heartbeat of the run, in milliseconds. read_at: time of this read.
        format: Data format of the checkpoint. Of a newer one than this version knows, the checkpoint is not read.
        newer_since: Time since which the task has been waiting for a worker of a newer version, in milliseconds.
        head: The stored head of the hash chain of the events.
        chain: The chain, once the checkpoint is decrypted; None without a key.
        problem: Why the checkpoint cannot be read; what was read is incomplete then.
    """

    counters: Counters = field(default_factory=Counters)
    done: dict[str, bytes] = field(default_factory=dict)
    intents: dict[str, bytes] = field(default_factory=dict)
    saved: dict[str, bytes] = field(default_factory=dict)
    emitted: dict[str, bytes] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    pages: StepPages | None = None
    entries: int = 0
    events: int = 0
    replays: int = 0
    lost: int = 0
    mail: int = 0
    cancel: bool = False
    quarantined: bool = False
    excused_crashes: int = 0
    recent_crashes: int = 0
    enqueued: int | None = None
    crash: Mapping[str, Any] = field(default_factory=dict)
    latest: Sequence[TaskEvent] = ()
    handed_from: str | None = None
    continued: str | None = None
    alive_at: int | None = None
    read_at: int = 0
    format: int = DATA_FORMAT
    newer_since: int | None = None
    head: bytes | None = None
    chain: HashChain | None = None
    problem: UnreadableCheckpoint | None = None

    @property
    def crashes_in_a_row(self) -> int:
        """Crashes since the last progress."""
        return self.counters.crashes - self.excused_crashes

    @property
    def crashes_in_window(self) -> int:
        """Crashes within the window, those since the last progress included."""
        return self.recent_crashes + self.crashes_in_a_row

    def excuse(self) -> Entry | None:
        """Return the entry that excuses the crashes: store it with the run's first progress. None: none counts."""
        if self.crashes_in_a_row < 1:
            return None
        return Entry(Kind.EXCUSE, "cleared", b"%d %d" % (self.counters.crashes, CRASH_WINDOW_MS))

    @property
    def records(self) -> int:
        """Number of step records; of a large checkpoint, of all its fields."""
        return len(self.done) if self.pages is None else self.pages.total

    async def read_record(self, step: str) -> bytes | None:
        """Return a step's record; None if the step is not recorded, then its intent and its progress are known.

        Raises `DecryptionError`.
        """
        found = self.done.get(step)
        return found if found is not None or self.pages is None else await self.pages.read(step)

    def take_known(self, step: str) -> bytes | None:
        """Return a step's record if it is known; it may be read from Redis again if it is asked for again."""
        return self.done.get(step) if self.pages is None else self.pages.take(step, None)

    async def read_unfinished(self, *steps: str) -> None:
        """Read the intents and the saved progress of steps, unless all are known. Raises `DecryptionError`."""
        if self.pages is not None and steps:
            await self.pages.read_unfinished(steps)

    async def read_records(self, steps: Sequence[str]) -> None:
        """Read the records of a few steps, unless all are known. Raises `DecryptionError`."""
        if self.pages is not None and steps:
            await self.pages.read_records(steps)

    async def read_emitted(self, unit: str) -> bytes | None:
        """Return the note of what a unit has emitted; None without one. Raises `DecryptionError`."""
        if unit not in self.emitted and self.pages is not None:
            await self.pages.read_emitted(unit)
        return self.emitted.get(unit)

    async def read_all(self) -> None:
        """Read the whole checkpoint. Raises `DecryptionError`, `UnreadableCheckpoint`."""
        if self.pages is not None:
            await self.pages.read_all()

    def by_kind(self) -> dict[str, dict[str, bytes]]:
        """Return the fields of the checkpoint by kind and step."""
        return {"d": self.done, "i": self.intents, "s": self.saved, "e": self.emitted}

    def decrypt(self, cipher: TaskCipher) -> None:
        """Decrypt the checkpoint in place, and the pages that are read later. Raises `DecryptionError`.

        A checkpoint that is not what the task's runs have written raises `ChangedCheckpoint`.
        """
        if self.pages is not None:
            self.pages.cipher = cipher
        for kind, records in self.by_kind().items():
            for step, value in records.items():
                records[step] = cipher.decrypt(f"{kind}:{step}", value)
        if self.head is None and not cipher.encrypts:
            return
        from ..security.hash_chain import checked_chain

        names = None if self.pages is not None else self.done
        self.chain = checked_chain(cipher, self.head, entries=self.entries, events=self.events, names=names)


class Written(NamedTuple):
    """Reply to a write. cancel: cancellation was requested. mail: number of the last message to the task, or 0."""

    cancel: bool
    mail: int


async def write_entries(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    entries: Sequence[Entry],
    *,
    first: int,
    head: bytes = b"",
    replicated: bool = False,
) -> Written:
    """Write entries in one script.

    Args:
        first: Number of the first of these entries. Entries that are stored already are skipped.
        head: The head of the hash chain with these entries; empty without a key.
        replicated: Return only when replicas have the entries.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries before the first one.
        NotReplicated: Too few replicas have the entries in time.
        UnreadableCheckpoint: Another program has replaced the checkpoint.
    """
    partition = delivery.partition
    keys = partition.run_keys(task_id)
    args: list[Argument] = [*delivery.fence, first, head]
    more = False
    for entry in entries:
        args += entry
        more = more or entry.kind in _MORE_KEYS
    if more:
        names = dict.fromkeys([stream_of_place(entry.step) for entry in entries if entry.kind in _STREAMS])
        keys = (*keys, partition.waiting)
        for name in names:
            keys += (partition.stream(task_id, name), partition.stream_keys(task_id, name))
    try:
        if replicated:
            answer: Any = await gateway.run_replicated(_WRITE, keys, args, partition.mark)
        else:
            answer = await gateway.run(_WRITE, keys, args)
    except WrongType as error:
        raise UnreadableCheckpoint(task_id, f"{partition.steps(task_id)}: {error}") from error
    if isinstance(answer, int):
        check_accepted(answer, task_id, f"record of {', '.join(entry.step for entry in entries)}")
    written: Any = answer  # which `check_accepted` has not refused
    return Written(written[0] == 2, written[1])


async def recorded_steps(gateway: Gateway, partition: Partition, task_id: str) -> list[str]:
    """Return the keys of a task's recorded steps, sorted."""
    names = await gateway.command("HKEYS", partition.steps(task_id))
    return sorted(name.removeprefix(b"d:").decode("utf-8", "replace") for name in names if name.startswith(b"d:"))


async def last_step(gateway: Gateway, partition: Partition, task_id: str) -> str | None:
    """Return the step that was recorded last, or None if the last 100 events of the log contain none."""
    for event in await read_last_events(gateway, partition, task_id, 100):
        if event.type == "step_completed" and event.step is not None:
            return event.step
    return None


_COUNTS: Final = ("attempts", "crashes", "returns", "excused", "recent", "recent_at", "events", "returned", "entries")
_NUMBERS: Final = (*_COUNTS, "replays")
_FIELDS: Final = (
    *(*_NUMBERS, "format", "newer_since", "at", "alive"),
    *("head", "suspect", "crash", "handed_from", "continued", "streams"),
)

_RECORD_BYTES: Final = DEFAULT_LARGE_LIMIT
"""Largest size of these fields together."""

_LATEST: Final = 8
"""Events of the log that are read: enough to see how the previous run ended."""


async def load_history(gateway: Gateway, delivery: Delivery, task_id: str) -> History:
    """Read the state that earlier runs left. The checkpoint is not decrypted yet.

    One round trip reads a checkpoint of one page. The rest of a larger one is read when it is asked for.
    """
    partition = delivery.partition
    keys = [getattr(partition, name)(task_id) for name in ("record", "inbox", "control", "steps", "log")]
    args: list[Argument] = [NO_CHUNKS, PAGE, _LATEST, _RECORD_BYTES, PAGE_BYTES, LOG_BYTES, *_FIELDS]
    fields, last, cancel, (cursor, steps), latest, time, problem = await gateway.run(_LOAD, keys, args)
    broken = [f"{name} has {value:,} bytes" for name, value in zip(_FIELDS, fields, strict=True) if type(value) is int]
    if broken:
        fields = [None if type(value) is int else value for value in fields]
    if problem is not None:
        broken.append(f"{partition.steps(task_id)}: {problem.decode()}")
    *stored, head, suspect, crash, handed_from, continued, streams = fields
    numbers = [_number(name, value, broken) for name, value in zip(_FIELDS, stored, strict=False)]
    attempts, crashes, returns, excused, recent, recent_at, events, returned, entries, replays = (
        value or 0 for value in numbers[: len(_NUMBERS)]
    )
    data_format, newer_since, enqueued, alive = numbers[len(_NUMBERS) :]
    now = milliseconds(time)
    # Each earlier delivery of this message ended without an outcome: an outcome would have deleted the message.
    lost = max(0, delivery.count - 1 - returned)
    history = History(
        Counters(attempts, crashes + lost, returns),
        entries=entries,
        events=events,
        replays=replays,
        lost=lost,
        mail=last,
        cancel=cancel == 1,
        quarantined=suspect is not None,
        excused_crashes=excused,
        recent_crashes=recent if now - recent_at <= CRASH_WINDOW_MS else 0,
        enqueued=enqueued,
        crash=crash_evidence(crash),
        latest=opened_events(latest, task_id, gateway.encryptor.of(partition, task_id)),
        handed_from=None if handed_from is None else handed_from.decode(),
        continued=None if continued is None else continued.decode(),
        streams=stream_names(streams),
        alive_at=alive,
        read_at=now,
        format=data_format or DATA_FORMAT,
        newer_since=newer_since,
        head=head,
    )
    if history.format > DATA_FORMAT:
        return history
    add_fields(history.by_kind(), pairs(steps).items(), broken)
    if int(cursor) != 0:
        total = int(await gateway.command("HLEN", partition.steps(task_id)))
        history.pages = StepPages(gateway, partition, task_id, history.by_kind(), total)
    if broken:
        history.problem = UnreadableCheckpoint(task_id, broken[0])
    return history


def _number(name: str, value: bytes | None, broken: list[str]) -> int | None:
    """Return a stored number, None if it is missing or damaged."""
    try:
        return None if value is None else int(value)
    except ValueError:
        broken.append(f"{name} must be a number, got {shown_bytes(value or b'')}")
        return None


_EDIT = queue_script("edit_checkpoint")
_CLOSE = queue_script("close_exported")


@dataclass(frozen=True, slots=True)
class Position:
    """Numbers of the last event and the last entry of a task.

    Attributes:
        state: `SCHEDULED` also for a task that waits, `QUEUED` also for one that runs.
        mark: Fields of the record that distinguish the task from a later one with equal numbers, as after a replay.
    """

    state: State | None
    events: int
    entries: int
    mark: tuple[bytes, ...] = field(default=(b"", b"", b""), compare=False)


async def read_position(gateway: Gateway, partition: Partition, task_id: str) -> Position:
    """Return where a task stands. state: None if there is no such task. Raises `UnreadableRecord`."""
    record = partition.record(task_id)
    names = ("state", "events", "entries", "settled", "replays", "entry")
    state, events, entries, *mark = await gateway.command("HMGET", record, *names)
    try:
        known = None if state is None else State(state.decode("utf-8", "replace"))
    except ValueError as error:
        raise UnreadableRecord(record, str(error)) from None
    numbers = (number_of(record, "events", events), number_of(record, "entries", entries))
    return Position(known, *numbers, tuple([value or b"" for value in mark]))


async def edit_checkpoint(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    position: Position,
    *,
    event: tuple[str, bytes],
    fields: Mapping[str, bytes],
    dropped: Collection[str] = (),
    wakes: str,
) -> bool | None:
    """Change fields of a checkpoint and log an event. Return whether that woke the task; None if it was refused.

    It is refused if a worker has the task, if the task has ended, or is not where it was any more. A queued task may be
    edited until a worker takes it.

    Args:
        position: What was read before the fields that the edit is based on.
        event: Type and data of the event, whose number follows that of the last one.
        fields: Names and values to set, each encrypted under its name.
        dropped: Names of fields to delete.
        wakes: What a parked task waits for if the edit wakes it.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    kind, data = event
    logged = Entry(Kind.EVENT, kind, b"%d" % (position.events + 1), data)
    chain = await _read_chain(gateway, partition, task_id, position)
    head = b""
    if chain is not None:
        gone = [Entry(Kind.DROP, name[2:], b"") for name in dropped if name.startswith("d:")]
        kinds = {"d": Kind.DONE, "s": Kind.SAVED}
        written = [Entry(kinds[name[0]], name[2:], b"") for name in fields if name[0] in kinds]
        head = chain.seal(chain.add([*gone, logged, *written]), position.entries + 1)
    args: list[Argument] = [
        GROUP,
        RESERVED,
        task_id,
        position.events,
        position.entries,
        *position.mark,
        kind,
        logged.encrypted(cipher).log,
        wakes,
        head,
        len(dropped),
        *dropped,
    ]
    for name, value in fields.items():
        args += (name, cipher.encrypt(name, value))
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    keys = [record, steps, log, partition.due, partition.nudge, partition.ready]
    answer = await gateway.run_once(_EDIT, keys, args)
    return None if answer == 0 else bool(answer == 2)


async def _read_chain(gateway: Gateway, partition: Partition, task_id: str, position: Position) -> HashChain | None:
    """Return the hash chain of a task that no worker has; None without a key.

    position: What was read before. Raises `DecryptionError`.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    record, steps = partition.record(task_id), partition.steps(task_id)
    head, fields = await gateway.pipeline([("HGET", record, "head"), ("HLEN", steps)], node_of=record)
    if head is None and not cipher.encrypts:
        return None
    from ..security.hash_chain import checked_chain

    names = await recorded_steps(gateway, partition, task_id) if fields <= MAX_COUNTED else None
    return checked_chain(cipher, head, entries=position.entries, events=position.events, names=names)


_MARK: Final = ("state", "events", "entries", "settled", "replays", "dead", "waits", "at", "entry", "token")


async def read_mark(gateway: Gateway, partition: Partition, task_id: str) -> tuple[bytes, ...]:
    """Return what `close_exported` compares. It changes with each run, edit, message and replay. The state is first."""
    record = partition.record(task_id)
    fields, counts, newest = await gateway.pipeline(
        [
            ("HMGET", record, *_MARK),
            ("HMGET", partition.inbox(task_id), "sent", "used", "last", "changed"),
            ("XREVRANGE", partition.log(task_id), "+", "-", "COUNT", 1),
        ],
        node_of=record,
    )
    return (*(value or b"" for value in (*fields, *counts)), newest[0][0] if newest else b"")


async def close_exported(
    gateway: Gateway, partition: Partition, task_id: str, mark: tuple[bytes, ...], *, event: bytes, retention: float
) -> bool:
    """Cancel a task that continues on another deployment, with an event `exported`. Return whether that was done.

    It is refused if a worker has the task, if it has ended, or if anything of it has changed.

    Args:
        mark: What `read_mark` returned before the task was read.
        event: Data of the event, JSON.
        retention: Seconds for which the task is kept.
    """
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    keys = [record, steps, log, partition.due, partition.retentions, partition.inbox(task_id)]
    keys += (partition.control(task_id), partition.timeline, partition.dead, partition.ready)
    args: list[Argument] = [task_id, round(retention * 1000), registered_retention(retention), event, GROUP, RESERVED]
    args += mark
    return bool(await gateway.run_once(_CLOSE, keys, args))
