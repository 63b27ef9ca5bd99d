"""Tasks beside tasks: the successor of a task, copies of it with its past, and a second use of its id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic_core import from_json

from .envelope import DEFAULT_PAYLOAD_LIMIT, Envelope, TaskMessage, copied_envelope
from .errors import (
    DecryptionError,
    HandOffRefused,
    LargeValueLost,
    PerdureError,
    QueueError,
    Refused,
    TaskExists,
    TaskNotFound,
    Unavailable,
    UnreadableEnvelope,
)
from .inspection.views import find_task
from .keys import SNAPSHOT, Namespace, Partition
from .partitions.route import spread
from .partitions.router import PartitionRouter
from .runtime import RUNTIME
from .security.encryption import ERROR, TaskCipher, event_field, message_field
from .transport.gateway import Gateway
from .transport.large_results import stored_record
from .transport.large_values import UPLOAD_ATTEMPTS, FieldUpload, LogUpload, read_arguments, store_with_upload
from .transport.pipelining import Argument
from .transport.scripts import pairs, queue_script
from .values import NamedValue, copied_values, value_kind
from .wording import listed

if TYPE_CHECKING:
    from .security.hash_chain import HashChain

_SUCCESSOR = queue_script("enqueue_successor")
_CONFIRM = queue_script("confirm_successor")
_COPY = queue_script("enqueue_copy")

MAX_HAND_OFFS: Final = 100
"""Longest chain of successors that may follow one task."""

_READS: Final = 5
"""Attempts to read a task that moves from one place to the next meanwhile."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The task that continues the work of another one.

    arguments: JSON. handoff: field of the checkpoint for the handoff document, and its value. source: id of the task
    that is continued, and a token of this one call. values: those of that task.
    """

    envelope: Envelope
    queue: str
    arguments: bytes
    handoff: tuple[str, bytes]
    source: str
    values: Sequence[NamedValue] = ()


async def enqueue_successor(gateway: Gateway, namespace: Namespace, successor: Successor) -> Partition:
    """Store a successor once, with the handoff document in its checkpoint; return its partition. Idempotent.

    Raises:
        HandOffRefused: Its id belongs to another task.
    """
    task_id = successor.envelope.id
    name, value = successor.handoff
    cipher = gateway.encryptor.of(namespace.partition(successor.queue), task_id)
    plain = TaskMessage(task_id, successor.envelope.encode(), successor.arguments, spread(task_id), own_id=True)
    message = plain.encrypted(cipher, store=gateway.value_store)
    args: tuple[Argument, ...] = (
        message.envelope,
        message.arguments,
        successor.source,
        f"s:{name}",
        cipher.encrypt(f"s:{name}", value),
        task_id,
        *copied_values(successor.values, cipher),
    )

    async def store(partition: Partition) -> bool:
        keys = [partition.ready, partition.closed, partition.record(task_id), partition.steps(task_id)]
        keys += (partition.timeline, partition.inbox(task_id))
        answer = await store_with_upload(
            gateway, partition, message.large, lambda uploads: gateway.run(_SUCCESSOR, [*keys, *uploads], args)
        )
        if answer == -2:
            raise HandOffRefused(f"could not continue the task as {task_id}: this id belongs to another task")
        return bool(answer >= 0)

    return await PartitionRouter(gateway, namespace, successor.queue, plain.lane).place(spread(task_id), store)


async def confirm_successor(gateway: Gateway, namespace: Namespace, source: str) -> None:
    """Store in the record of the continued task that its successor was read, or is being cancelled. Idempotent.

    The record of a successor that has ended may expire before the continued task is settled, such as while all workers
    of its queue are down. Without this note, the next run of that task would store the successor again.

    Args:
        source: Field `handed_from` of the successor's record.
    """
    origin = source.partition(" ")[0]
    found = await find_task(gateway, namespace, origin)
    if found is not None:
        await gateway.run(_CONFIRM, [found.record(origin)], [source])


PLAIN: Final = "plain"
"""Name in an entry of `TaskPast.log` of data that stay plain, in place of `data`."""


@dataclass(frozen=True, slots=True)
class TaskPast:
    """Stored data of a task, decrypted. The collections may be read more than once.

    Attributes:
        events, entries: Numbers of its last event and its last entry.
        format: Data format that a worker must know to read the checkpoint; None for 1.
        fields: Names and values of checkpoint fields, step records with large results as a whole. No name occurs twice.
        inbox: Names and values of inbox fields; messages and values decrypted, after their number and a space.
        log: Entries of the log, oldest first, with decrypted `data`, or with data of a script under `PLAIN`. The
            id `*` is the time of Redis.
        snapshot: Number of the last event in the snapshot among the fields; None without one.
    """

    events: int
    entries: int
    format: int | None
    fields: Iterable[tuple[str, bytes]]
    inbox: Iterable[tuple[str, bytes]]
    log: Iterable[tuple[str, Mapping[str, bytes]]]
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class TaskInput:
    """The input that a task was enqueued with. arguments: decrypted JSON, with its secrets."""

    partition: Partition
    envelope: Envelope
    arguments: bytes
    stored: bytes
    """The envelope as it was stored, with fields of later versions."""
    edited: bool = False
    """Whether a replay has replaced the arguments."""


async def read_task_input(gateway: Gateway, partition: Partition, task_id: str) -> TaskInput:
    """Read the input of a task, whatever its state.

    Raises:
        TaskNotFound: There is no such task.
        DecryptionError: The arguments cannot be decrypted.
        LargeValueLost: A part of large arguments is missing.
        UnreadableEnvelope: This version cannot read the envelope.
    """
    record = partition.record(task_id)
    for _ in range(_READS):
        fields: dict[str, Any] = dict(zip(_FIELDS, await gateway.command("HMGET", record, *_FIELDS), strict=True))
        if not any(fields.values()):
            raise TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")
        for place, stream in (("entry", partition.ready), ("dead", partition.dead)):
            if (entry := fields[place]) is not None:
                found = await gateway.command("XRANGE", stream, entry, entry)
                message = pairs(found[0][1]) if found else {}
                fields |= {name: message.get(name.encode(), fields[name]) for name in ("env", "args")}
        if fields["args"] is not None and (fields["env"] or fields["task"]):
            stored = fields["env"] or _envelope(task_id, fields["task"], fields["app"]).encode()
            envelope = Envelope.decode(stored)
            arguments = await read_arguments(
                gateway, partition, task_id, envelope.task, envelope.secrets, fields["args"]
            )
            return TaskInput(partition, envelope, arguments, stored, fields["edited"] is not None)
    raise UnreadableEnvelope(f"could not read the message of task {task_id}: it was not in any place")


_FIELDS: Final = ("state", "entry", "dead", "env", "args", "task", "app", "edited")


def _envelope(task_id: str, task: bytes, app: bytes | None) -> Envelope:
    """Return the envelope of which a record has kept only the names."""
    return Envelope(id=task_id, task=task.decode(), app=None if app is None else app.decode())


async def find_conflicts(
    gateway: Gateway, known: Sequence[tuple[Partition, TaskMessage]], same: Callable[[bytes, bytes], bool] | None = None
) -> dict[str, str]:
    """Return how stored tasks differ from messages with their ids that were not stored, by id.

    What cannot be read counts as the same: a task whose record has expired, or whose key this process does not have.

    Args:
        known: The messages, and the partitions that have tasks with their ids.
        same: Whether arguments whose JSON differs mean the same, such as a set in another order.
    """
    found = await asyncio.gather(*(_conflict(gateway, *one, same) for one in known))
    return {message.id: conflict for (_, message), conflict in zip(known, found, strict=True) if conflict is not None}


async def check_same_app(gateway: Gateway, message: TaskMessage, partition: Partition) -> None:
    """Raise `TaskExists` if a stored task with the message's id belongs to another app, as far as it is readable."""
    try:
        stored = await read_task_input(gateway, partition, message.id)
    except Unavailable:
        raise
    except PerdureError:
        return
    if (other := _other_task(stored.envelope, Envelope.decode(message.envelope))) is not None:
        raise TaskExists(message.id, other)


def check_conflicts(conflicts: Mapping[str, str]) -> None:
    """Raise `TaskExists` if there are conflicts, by id."""
    if conflicts:
        (task_id, conflict), *others = conflicts.items()
        raise TaskExists(task_id, conflict, [other for other, _ in others])


async def _conflict(
    gateway: Gateway, partition: Partition, message: TaskMessage, same: Callable[[bytes, bytes], bool] | None
) -> str | None:
    try:
        stored = await read_task_input(gateway, partition, message.id)
        wanted = Envelope.decode(message.envelope)
        if (other := _other_task(stored.envelope, wanted)) is not None:
            return other
        arguments = message.plain_arguments(gateway.encryptor.of(partition, message.id), wanted.task, wanted.secrets)
        if stored.edited or stored.arguments == arguments:
            return None
        names = _different(_members(stored.arguments), _members(arguments))
        if not names or (same is not None and same(stored.arguments, arguments)):
            return None
    except (TaskNotFound, UnreadableEnvelope, DecryptionError, LargeValueLost, Refused, ValueError):
        return None
    except QueueError:
        raise
    except PerdureError:  # of the value store
        return None
    return f"with other arguments ({listed(names, _SHOWN_NAMES)})"


def _other_task(stored: Envelope, wanted: Envelope) -> str | None:
    """Return that a stored task has another name or app, or None."""
    if stored.task != wanted.task:
        return f"as a task {stored.task!r}, not {wanted.task!r}"
    if None not in (stored.app, wanted.app) and stored.app != wanted.app:
        return f"as a task of app {stored.app!r}, not {wanted.app!r}"
    return None


_SHOWN_NAMES: Final = 5


def _members(arguments: bytes) -> dict[str, Any]:
    found = from_json(arguments)
    return found if isinstance(found, dict) else {"": found}


def _different(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that are not the same in both."""
    missing = object()
    names = dict.fromkeys([*given, *stored])
    return [name for name in names if stored.get(name, missing) != given.get(name, missing)]


async def store_fork(
    gateway: Gateway,
    namespace: Namespace,
    origin: TaskInput,
    task_id: str,
    *,
    at: str,
    arguments: bytes,
    event: bytes,
    fields: Mapping[str, bytes],
) -> Partition:
    """Enqueue a task with the name and checkpoint of another one; return its partition. Idempotent for one id and `at`.

    Args:
        at: The task and the point of its history that is copied.
        arguments: JSON.
        event: Data of the first event of the new task's log, JSON.
        fields: Checkpoint fields by their names. Encrypted again, for the new task.

    Raises:
        TaskExists: The id belongs to another task.
    """
    envelope = copied_envelope(orjson.loads(origin.stored), task_id)
    log = [("*", {"type": b"forked", "n": b"1", "data": event})]
    past = TaskPast(1, 0, None, fields.items(), (), log, 1 if f"s:{SNAPSHOT}" in fields else None)
    copied: dict[str, Any] = {"envelope": envelope, "arguments": arguments, "past": past, "source": at}
    return await store_copy(gateway, namespace, origin.partition.queue, task_id, **copied)


async def store_copy(
    gateway: Gateway,
    namespace: Namespace,
    queue: str,
    task_id: str,
    *,
    envelope: bytes,
    arguments: bytes,
    past: TaskPast,
    source: str,
    due: int | None = None,
) -> Partition:
    """Enqueue a task with a past, encrypted for this deployment; return its partition. Idempotent for id and source.

    The past is uploaded in portions. The task appears at the end, with all of it; see enqueue_copy.lua.

    Args:
        source: What the task is a copy of, or a token of this call.
        due: Time until which it is scheduled, in milliseconds of Redis' clock; at once if it has passed.

    Raises:
        TaskExists: The id belongs to another task.
        LargeValueLost: The uploads expired, again and again, before the task was stored.
    """
    cipher = gateway.encryptor.of(namespace.partition(queue), task_id)
    plain = TaskMessage(task_id, envelope, arguments, spread(task_id), own_id=True)
    message = plain.encrypted(cipher, store=gateway.value_store)
    args = (message.envelope, message.arguments, source, task_id, past.events, past.entries, past.format or "")

    async def store(partition: Partition) -> bool:
        record = partition.record(task_id)
        keys = [partition.ready, partition.closed, record, partition.timeline, partition.steps(task_id)]
        keys += (partition.log(task_id), partition.inbox(task_id))
        head = b""
        for attempt in range(UPLOAD_ATTEMPTS):
            steps, log, inbox = past_uploads(gateway, partition, task_id)
            uploads = [steps.key, log.key, inbox.key]
            if message.large is not None:
                uploads.append(partition.upload(task_id, message.large.reference.digest))
            if attempt or not await gateway.command("EXISTS", record):
                head = await upload_past(gateway, cipher, task_id, past, steps, log, inbox)
                if message.large is not None:
                    await message.large.upload(gateway, uploads[-1])
            counts = (steps.count, log.count, inbox.count)
            given = [*keys, *uploads[:3], partition.due, partition.nudge, *uploads[3:]]
            answer = await gateway.run(_COPY, given, [*args, *counts, "" if due is None else due, head])
            if answer == 0:
                raise TaskExists(task_id)
            if answer is not None:
                return bool(answer == 1)
        raise LargeValueLost(f"the past of task {task_id}", "parts of it expired before the task was stored")

    return await PartitionRouter(gateway, namespace, queue, plain.lane).place(spread(task_id), store)


def past_uploads(gateway: Gateway, partition: Partition, task_id: str) -> tuple[FieldUpload, LogUpload, FieldUpload]:
    """Return uploads for the checkpoint, the log and the inbox of a task, under names that no other call uses."""
    steps, log, inbox = (partition.upload(task_id, f"{RUNTIME.token(8)}.{name}") for name in ("steps", "log", "inbox"))
    return FieldUpload(gateway, steps), LogUpload(gateway, log), FieldUpload(gateway, inbox)


async def upload_past(
    gateway: Gateway,
    cipher: TaskCipher,
    task_id: str,
    past: TaskPast,
    steps: FieldUpload,
    log: LogUpload,
    inbox: FieldUpload,
) -> bytes:
    """Upload the past of a task, and return the head of its hash chain; empty without a key."""
    from .security.hash_chain import ChainLinks, HashChain

    chain = HashChain(cipher, ChainLinks(), ())
    for name, value in past.fields:
        fields: Sequence[Argument]
        if name.startswith("d:"):
            key = name.removeprefix("d:")
            chain.add([("mark", key)])
            fields = await stored_record(gateway, cipher, task_id, key, value, DEFAULT_PAYLOAD_LIMIT)
        else:
            fields = (name, cipher.encrypt(name, value))
        for position in range(0, len(fields), 2):
            await steps.put(fields[position], fields[position + 1])
    for entry, values in past.log:
        await log.add(entry, _encrypted_entry(cipher, values, chain, past.snapshot))
    for name, value in past.inbox:
        at, space, content = value.partition(b" ")
        sealed = value_kind(name[2:]) if name.startswith("v:") else None
        if name.startswith("m:"):
            sealed = message_field(int(name[2:]))
        await inbox.put(name, value if sealed is None else at + space + cipher.encrypt(sealed, content))
    for upload in (steps, log, inbox):
        await upload.flush()
    if not cipher.encrypts:
        return b""
    return chain.seal(chain.end_at(past.events), past.entries)  # an agent finds that last events are missing


def _encrypted_entry(
    cipher: TaskCipher, values: Mapping[str, bytes], chain: HashChain, snapshot: int | None
) -> dict[str, bytes]:
    """Return an entry of a log as it is stored; one with a number is added to the chain."""
    stored = {name: value for name, value in values.items() if name != PLAIN}
    if "data" in values:
        kind = ERROR
        if "n" in values:
            number, event_type, data = int(values["n"]), values["type"].decode(), values["data"]
            kind = event_field(number, event_type)
            if not chain.links.last.number:
                chain.begin_after(number - 1)
            more = [("saved", SNAPSHOT)] if number == snapshot else []
            chain.add([("event", event_type, values["n"], data), *more])
        stored["data"] = cipher.encrypt(kind, values["data"])
    elif PLAIN in values:
        stored["data"] = values[PLAIN]
    return stored
