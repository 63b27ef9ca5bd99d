"""Edit of the checkpoint of a task that no worker has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..keys import Partition
from ..records import State
from ..security import event_field
from ..transport import Argument, Gateway, queue_script

__all__ = ["Position", "edit_checkpoint", "read_position"]

_EDIT = queue_script("edit_checkpoint")


@dataclass(frozen=True, slots=True)
class Position:
    """Numbers of the last event and the last entry of a task. state: `SCHEDULED` also for a task that waits."""

    state: State | None
    events: int
    entries: int


async def read_position(gateway: Gateway, partition: Partition, task_id: str) -> Position:
    """Return where a task stands. state: None if there is no such task."""
    record = partition.record(task_id)
    state, events, entries = await gateway.command("HMGET", record, "state", "events", "entries")
    return Position(None if state is None else State(state.decode()), int(events or 0), int(entries or 0))


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

    It is refused if a worker has the task or may take it, if the task has ended, or is not where it was any more.

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
        task_id,
        position.events,
        position.entries,
        kind,
        cipher.encrypt(event_field(position.events + 1), data),
        wakes,
        len(dropped),
        *dropped,
    ]
    for name, value in fields.items():
        args += (name, cipher.encrypt(name, value))
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    answer = await gateway.run_once(_EDIT, [record, steps, log, partition.due, partition.nudge], args)
    return None if answer == 0 else bool(answer == 2)
