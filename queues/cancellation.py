"""Cancellation of a task."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from .derived_tasks import confirm_successor
from .errors import DecryptionError, Refused, TaskNotFound
from .keys import GROUP, RESERVED, Namespace, Partition
from .partitions import registered_retention
from .records import State
from .shared_config import read_seconds
from .transport import Gateway, queue_script

__all__ = ["cancel_task"]

_CANCEL: Final = queue_script("cancel")


async def cancel_task(gateway: Gateway, partition: Partition, task_id: str, *, retention: float) -> State:
    """Cancel a task, and end its turn if it is one of a session. See `TaskHandle.cancel`.

    If the caller dies in between, another call, or the session sweeper, ends the turn.

    Args:
        retention: Seconds for which the record is kept, if the namespace has no setting.
    """
    ready, record, steps, log, inbox, control = partition.run_keys(task_id)
    keys = [ready, record, steps, log, partition.due, partition.retentions, inbox, control, partition.timeline]
    namespace = Namespace(partition.namespace)
    answer = b"changed"
    while answer == b"changed":  # the task was replaced or replayed after it was read
        stored, (source, *read) = await gateway.pipeline(
            [
                ("HGET", namespace.config, "result_ttl"),
                ("HMGET", record, "handed_from", "at", "entry", "token", "replays", "waits"),
            ]
        )
        ttl = read_seconds(stored) or retention
        if source is not None:  # a cancelled successor must not be stored again once its record has expired
            await confirm_successor(gateway, namespace, source.decode())
        kept = (round(ttl * 1000), registered_retention(ttl))
        *read, waits = (value or b"" for value in read)
        args = (GROUP, RESERVED, task_id, *kept, *read, namespace.worker_channel(""), waits)
        answer = await gateway.run(_CANCEL, [*keys, *_versions(partition, waits.decode())], args)
    if answer == b"missing":
        raise TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")
    if answer == b"cancelled" and task_id.startswith("turn-"):
        await _end_turn(gateway, partition, task_id)
    return State.RUNNING if answer == b"requested" else State(answer.decode())


async def _end_turn(gateway: Gateway, partition: Partition, task_id: str) -> None:
    """End the turn of a cancelled task. A task of a forgotten session is deleted."""
    from .sessions import (  # a producer that cancels no turn does not need them
        SessionAddress,
        SessionTurnEnd,
        TurnEarly,
        end_turn,
        forget_task,
        parse_turn_id,
    )

    if (turn := parse_turn_id(task_id)) is None:
        return
    address = SessionAddress.at(Namespace(partition.namespace), turn.digest)
    # Suppressed: Redis has lost the claim; this caller cannot read the next message, or has no rights to the session.
    with suppress(TurnEarly, DecryptionError, Refused):  # the session sweeper does the rest
        if not await end_turn(gateway, address, turn, SessionTurnEnd("cancelled", b"cancelled")):
            await forget_task(gateway, partition, task_id)


def _versions(partition: Partition, waits: str) -> tuple[str, ...]:
    """Return the set of tasks that wait for a version if one with this field `waits` does; see await_version.lua."""
    if not waits.startswith("version "):
        return ()
    _, of, task = waits.partition(" of ")
    return (partition.task_versions(task) if of else partition.versions,)
