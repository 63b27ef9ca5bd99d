"""Edit of the checkpoint of a task that no worker has, and its end after an export."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..keys import GROUP, RESERVED, Partition
from ..partitions.retention import registered_retention
from ..records import State
from ..security.encryption import event_field
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script

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
    """Return where a task stands. state: None if there is no such task."""
    record = partition.record(task_id)
    names = ("state", "events", "entries", "settled", "replays", "entry")
    state, events, entries, *mark = await gateway.command("HMGET", record, *names)
    known = None if state is None else State(state.decode())
    return Position(known, int(events or 0), int(entries or 0), tuple([value or b"" for value in mark]))


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
    args: list[Argument] = [
        GROUP,
        RESERVED,
        task_id,
        position.events,
        position.entries,
        *position.mark,
        kind,
        cipher.encrypt(event_field(position.events + 1), data),
        wakes,
        len(dropped),
        *dropped,
    ]
    for name, value in fields.items():
        args += (name, cipher.encrypt(name, value))
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    keys = [record, steps, log, partition.due, partition.nudge, partition.ready]
    answer = await gateway.run_once(_EDIT, keys, args)
    return None if answer == 0 else bool(answer == 2)


async def read_mark(gateway: Gateway, partition: Partition, task_id: str) -> tuple[bytes, ...]:
    """Return what `close_exported` compares. It changes with each run, edit, message and replay. The state is first."""
    record = partition.record(task_id)
    fields, counts, newest = await gateway.pipeline(
        [
            ("HMGET", record, "state", "events", "entries", "settled", "replays", "dead", "waits"),
            ("HMGET", partition.inbox(task_id), "sent", "used", "last"),
            ("XREVRANGE", partition.log(task_id), "+", "-", "COUNT", 1),
        ],
        node_of=record,
    )
    return (*(value or b"" for value in (*fields, *counts)), newest[0][0] if newest else b"")


async def close_exported(
    gateway: Gateway, partition: Partition, task_id: str, mark: tuple[bytes, ...], *, event: bytes, retention: float
) -> bool:
    """Cancel a task that continues on another deployment, with an event `exported`. Return whether that was done.

    It is refused if a worker has the task or may take it, or if anything of it has changed.

    Args:
        mark: What `read_mark` returned before the task was read.
        event: Data of the event, JSON.
        retention: Seconds for which the task is kept.
    """
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    keys = [record, steps, log, partition.due, partition.retentions, partition.inbox(task_id)]
    keys += (partition.control(task_id), partition.timeline, partition.dead)
    args: list[Argument] = [task_id, round(retention * 1000), registered_retention(retention), event, *mark]
    return bool(await gateway.run_once(_CLOSE, keys, args))
