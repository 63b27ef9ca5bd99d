"""Tasks beside tasks: the successor of a task, its fork at a point of its history, and a second use of its id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import orjson
from pydantic_core import from_json

from .envelope import DEFAULT_PAYLOAD_LIMIT, Envelope, TaskMessage
from .errors import (
    DecryptionError,
    HandOffRefused,
    LargeValueLost,
    PerdureError,
    QueueError,
    Refused,
    TaskExists,
    TaskNotFound,
    UnreadableEnvelope,
)
from .inspection import find_task
from .keys import Namespace, Partition
from .partitions import PartitionRouter, spread
from .security import ERROR, MESSAGE, event_field
from .transport import (
    Argument,
    Gateway,
    pairs,
    queue_script,
    read_arguments,
    store_with_upload,
    stored_record,
)

__all__ = [
    "MOST_HAND_OFFS",
    "Successor",
    "TaskInput",
    "TaskPast",
    "check_conflicts",
    "confirm_successor",
    "enqueue_successor",
    "find_conflicts",
    "read_task_input",
    "store_fork",
    "store_import",
]

_SUCCESSOR = queue_script("enqueue_successor")
_CONFIRM = queue_script("confirm_successor")
_FORK = queue_script("enqueue_fork")
_IMPORT = queue_script("enqueue_import")

MOST_HAND_OFFS: Final = 100
"""Longest chain of successors that may follow one task."""

_READS: Final = 5
"""Attempts to read a task that moves from one place to the next meanwhile."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The task that continues the work of another one.

    arguments: JSON. handoff: field of the checkpoint for the handoff document, and its value. source: id of the task
    that is continued, and a token of this one call.
    """

    envelope: Envelope
    queue: str
    arguments: bytes
    handoff: tuple[str, bytes]
    source: str


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
    args = (
        message.envelope,
        message.arguments,
        successor.source,
        f"s:{name}",
        cipher.encrypt(f"s:{name}", value),
        task_id,
    )

    async def store(partition: Partition) -> bool:
        keys = [partition.ready, partition.closed, partition.record(task_id), partition.steps(task_id)]
        keys.append(partition.timeline)
        answer = await store_with_upload(
            gateway, partition, message.large, lambda uploads: gateway.run(_SUCCESSOR, [*keys, *uploads], args)
        )
        if answer == -2:
            raise HandOffRefused(f"could not continue the task as {task_id}: this id belongs to another task")
        return bool(answer >= 0)

    return await PartitionRouter(gateway, namespace, successor.queue).place(spread(task_id), store)


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


@dataclass(frozen=True, slots=True)
class TaskPast:
    """Stored data of a task, decrypted for another deployment.

    Attributes:
        events, entries: Numbers of its last event and its last entry.
        format: Data format that a worker must know to read the checkpoint; None for 1.
        fields: Checkpoint fields by their names, step records with large results as a whole.
        inbox: Fields of the inbox; messages decrypted, after their time and a space.
        log: Entries of the log, oldest first, with decrypted data.
    """

    events: int
    entries: int
    format: int | None
    fields: Mapping[str, bytes]
    inbox: Mapping[str, bytes]
    log: Sequence[tuple[str, Mapping[str, bytes]]]


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
            raise TaskNotFound(task_id, f"queue {partition.queue!r}")
        for place, stream in (("entry", partition.ready), ("dead", partition.dead)):
            if (entry := fields[place]) is not None:
                found = await gateway.command("XRANGE", stream, entry, entry)
                message = pairs(found[0][1]) if found else {}
                fields |= {name: message.get(name.encode(), fields[name]) for name in ("env", "args")}
        if fields["args"] is not None and (fields["env"] or fields["task"]):
            stored = fields["env"] or Envelope(id=task_id, task=(fields["task"] or b"").decode()).encode()
            envelope = Envelope.decode(stored)
            arguments = await read_arguments(gateway, partition, task_id, envelope.task, fields["args"])
            return TaskInput(partition, envelope, arguments, stored, fields["edited"] is not None)
    raise UnreadableEnvelope(f"could not read the message of task {task_id}: it was not in any place")


_FIELDS: Final = ("state", "entry", "dead", "env", "args", "task", "edited")


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
        if stored.envelope.task != wanted.task:
            return f"as a task {stored.envelope.task!r}, not {wanted.task!r}"
        arguments = message.plain_arguments(gateway.encryptor.of(partition, message.id), wanted.task)
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
    more = ", ..." if len(names) > _SHOWN_NAMES else ""
    return f"with other arguments ({', '.join(names[:_SHOWN_NAMES])}{more})"


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
    done: Mapping[str, bytes],
    saved: Mapping[str, bytes],
    other: Mapping[str, bytes] = MappingProxyType({}),
) -> Partition:
    """Enqueue a task with the name and checkpoint of another one; return its partition. Idempotent for one id and `at`.

    Args:
        at: The task and the point of its history that is copied.
        arguments: JSON.
        event: Data of the first event of the new task's log, JSON.
        done: Step records of the checkpoint, by key. Encrypted again, for the new task.
        saved: Saved progress, by key. Encrypted again, too.
        other: Fields of other kinds by their names, each encrypted again under its name.

    Raises:
        TaskExists: The id belongs to another task.
    """
    queue = origin.partition.queue
    cipher = gateway.encryptor.of(namespace.partition(queue), task_id)
    envelope = orjson.dumps(orjson.loads(origin.stored) | {"id": task_id})
    plain = TaskMessage(task_id, envelope, arguments, spread(task_id), own_id=True)
    message = plain.encrypted(cipher, store=gateway.value_store)
    args: list[Argument] = [
        message.envelope,
        message.arguments,
        at,
        cipher.encrypt(event_field(1), event),
        task_id,
    ]
    for key, value in done.items():
        args += await stored_record(gateway, cipher, task_id, key, value, DEFAULT_PAYLOAD_LIMIT)
    for key, value in saved.items():
        args += (f"s:{key}", cipher.encrypt(f"s:{key}", value))
    for name, value in other.items():
        args += (name, cipher.encrypt(name, value))

    async def store(partition: Partition) -> bool:
        record = partition.record(task_id)
        keys = [partition.ready, partition.closed, record, partition.steps(task_id), partition.log(task_id)]
        keys.append(partition.timeline)
        answer = await store_with_upload(
            gateway, partition, message.large, lambda uploads: gateway.run(_FORK, [*keys, *uploads], args)
        )
        if answer == 0:
            raise TaskExists(task_id)
        return bool(answer == 1)

    return await PartitionRouter(gateway, namespace, queue).place(spread(task_id), store)


async def store_import(
    gateway: Gateway,
    namespace: Namespace,
    queue: str,
    task_id: str,
    *,
    envelope: bytes,
    arguments: bytes,
    past: TaskPast,
    token: str,
) -> Partition:
    """Enqueue a task with the past that it had elsewhere, encrypted for this deployment; return its partition.

    Args:
        token: Names this call: repeated with it, the call stores nothing twice.

    Raises:
        TaskExists: The id belongs to another task.
    """
    cipher = gateway.encryptor.of(namespace.partition(queue), task_id)
    plain = TaskMessage(task_id, envelope, arguments, spread(task_id), own_id=True)
    message = plain.encrypted(cipher, store=gateway.value_store)
    fields: list[Argument] = []
    for name, value in past.fields.items():
        if name.startswith("d:"):
            key = name.removeprefix("d:")
            fields += await stored_record(gateway, cipher, task_id, key, value, DEFAULT_PAYLOAD_LIMIT)
        else:
            fields += (name, cipher.encrypt(name, value))
    inbox: list[Argument] = []
    for name, value in past.inbox.items():
        at, space, data = value.partition(b" ")
        inbox += (name, at + space + cipher.encrypt(MESSAGE, data) if name.startswith("m:") else value)
    numbers = (past.events, past.entries, past.format or "", len(fields) // 2, len(inbox) // 2)
    args: list[Argument] = [message.envelope, message.arguments, token, task_id, *numbers, *fields, *inbox]
    for entry, values in past.log:
        args += (entry, len(values))
        kind = event_field(int(values["n"])) if "n" in values else ERROR
        for name, value in values.items():
            args += (name, cipher.encrypt(kind, value) if name == "data" else value)

    async def store(partition: Partition) -> bool:
        record = partition.record(task_id)
        keys = [partition.ready, partition.closed, record, partition.steps(task_id), partition.log(task_id)]
        keys += (partition.timeline, partition.inbox(task_id))
        answer = await store_with_upload(
            gateway, partition, message.large, lambda uploads: gateway.run(_IMPORT, [*keys, *uploads], args)
        )
        if answer == 0:
            raise TaskExists(task_id)
        return bool(answer == 1)

    return await PartitionRouter(gateway, namespace, queue).place(spread(task_id), store)
