"""Storing the task that goes on where another has handed on: like enqueuing, with the handoff in its checkpoint.

A task that begins as another one stood: with its name, its arguments, and as much of its checkpoint as is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from .envelope import Envelope
from .errors import HandOffRefused, TaskExists, TaskNotFound, UnreadableEnvelope
from .keys import Namespace, Partition
from .partitions import PartitionRouter, spread
from .security import arguments_field, event_field
from .transport import Argument, Gateway, pairs, queue_script

__all__ = [
    "MOST_HAND_OFFS",
    "Successor",
    "TaskInput",
    "enqueue_successor",
    "read_task_input",
    "recorded_results",
    "store_fork",
]

_HAND: Final = queue_script("enqueue_successor")

MOST_HAND_OFFS: Final = 100
"""How often a task may be handed on, from one to the next."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The task that goes on. arguments: JSON. handoff: the field of the checkpoint that it finds, and its value.

    source: the task that hands on, and a token of this one time.
    """

    envelope: Envelope
    queue: str
    arguments: bytes
    handoff: tuple[str, bytes]
    source: str


async def enqueue_successor(gateway: Gateway, namespace: Namespace, successor: Successor) -> Partition:
    """Store the task; returns where it is. May be asked again: one that is stored stays as it is by now.

    Raises `HandOffRefused` where its id is another task's.
    """
    task_id, number = successor.envelope.id, spread(successor.envelope.id)
    name, value = successor.handoff
    seal = gateway.encryptor.of(namespace.partition(successor.queue), task_id)
    args = (
        successor.envelope.encode(),
        seal.encrypt(arguments_field(successor.envelope.task), successor.arguments),
        successor.source,
        f"s:{name}",
        seal.encrypt(f"s:{name}", value),
    )
    way = PartitionRouter(gateway, namespace, successor.queue)
    await way.refresh()
    while True:
        for former in way.closed_partitions(number):  # nothing new comes into closed partitions, so looking is enough
            if await gateway.command("HGET", former.record(task_id), "handed_from") == successor.source.encode():
                return former
        partition = way.partition(number)
        keys = [partition.ready, partition.closed, partition.record(task_id), partition.steps(task_id)]
        answer = await gateway.run(_HAND, keys, args)
        if answer >= 0:
            return partition
        if answer == -2:
            raise HandOffRefused(f"the task cannot be handed on: {task_id}, as which it would go on, is another task")
        await way.on_closed([partition])


_FORK = queue_script("enqueue_fork")

_LOOKS: Final = 5
"""How often a task that is on its way from one place to the next is looked for."""


@dataclass(frozen=True, slots=True)
class TaskInput:
    """What a task was enqueued with. arguments: JSON, opened, secrets and all."""

    partition: Partition
    envelope: Envelope
    arguments: bytes
    stored: bytes
    """The envelope as it was stored, with what later versions put into it."""


async def read_task_input(gateway: Gateway, partition: Partition, task_id: str) -> TaskInput:
    """What a task was enqueued with, wherever it stands now.

    Raises `TaskNotFound`, `DecryptionError`, and `UnreadableEnvelope` for what this version cannot read.
    """
    record = partition.record(task_id)
    for _ in range(_LOOKS):
        fields = _by_name(await gateway.command("HMGET", record, *_KEPT))
        if not any(fields.values()):
            raise TaskNotFound(task_id, f"queue {partition.queue!r}")
        for place, stream in (("entry", partition.ready), ("dead", partition.dead)):
            if (entry := fields[place]) is not None:
                found = await gateway.command("XRANGE", stream, entry, entry)
                message = pairs(found[0][1]) if found else {}
                fields |= {name: message.get(name.encode(), fields[name]) for name in ("env", "args")}
        if fields["args"] is not None and (fields["env"] or fields["task"]):
            return _origin(gateway, partition, task_id, fields)
    raise UnreadableEnvelope(f"task {task_id} has no message that could be enqueued anew")


_KEPT: Final = ("state", "entry", "dead", "env", "args", "task")


def _by_name(values: list[bytes | None]) -> dict[str, bytes | None]:
    return dict(zip(_KEPT, values, strict=True))


def _origin(gateway: Gateway, partition: Partition, task_id: str, fields: Mapping[str, bytes | None]) -> TaskInput:
    stored = fields["env"] or Envelope(id=task_id, task=(fields["task"] or b"").decode()).encode()
    envelope = Envelope.decode(stored)
    arguments = gateway.encryptor.of(partition, task_id).decrypt(
        arguments_field(envelope.task), fields["args"] or b"{}"
    )
    return TaskInput(partition, envelope, arguments, stored)


async def recorded_results(gateway: Gateway, partition: Partition, task_id: str) -> dict[str, bytes]:
    """The step records of a task, by key. Raises `DecryptionError`."""
    seal = gateway.encryptor.of(partition, task_id)
    fields = pairs(await gateway.command("HGETALL", partition.steps(task_id)))
    return {
        (key := name[2:].decode()): seal.decrypt(f"d:{key}", value)
        for name, value in fields.items()
        if name.startswith(b"d:")
    }


async def store_fork(
    gateway: Gateway,
    namespace: Namespace,
    origin: TaskInput,
    task_id: str,
    *,
    at: str,
    arguments: bytes,
    told: bytes,
    done: Mapping[str, bytes],
    saved: Mapping[str, bytes],
) -> Partition:
    """Enqueue a task like another one, with a checkpoint to go on from; returns where it is.

    at: what it is a copy of; under the same id and `at`, it is stored once. arguments, told: JSON; `told` is the data
    of the first event of its log. done, saved: its checkpoint, by key. All of it is sealed anew, for this task.
    Raises `TaskExists`, `Unavailable`.
    """
    queue = origin.partition.queue
    seal = gateway.encryptor.of(namespace.partition(queue), task_id)
    args: list[Argument] = [
        orjson.dumps(orjson.loads(origin.stored) | {"id": task_id}),
        seal.encrypt(arguments_field(origin.envelope.task), arguments),
        at,
        seal.encrypt(event_field(1), told),
    ]
    for shelf, records in (("d", done), ("s", saved)):
        for key, value in records.items():
            args += (f"{shelf}:{key}", seal.encrypt(f"{shelf}:{key}", value))
    way = PartitionRouter(gateway, namespace, queue)
    await way.refresh()
    number = spread(task_id)
    while True:  # from the oldest partition that it may be in: each knows it, or is closed, or takes it
        partition = way.partition(number)
        record = partition.record(task_id)
        keys = [partition.ready, partition.closed, record, partition.steps(task_id), partition.log(task_id)]
        answer = await gateway.run(_FORK, keys, args)
        if answer == 1:
            return partition
        if answer == 0:
            raise TaskExists(task_id)
        await way.on_closed([partition])
