"""Cancellation of a task, at once or by a request to the workers.

A user of Redis that may not remove tasks from a queue, such as a producer, adds a request to the due set of the
task's partition, where a worker finds it at once and cancels the task in its place. The request names the life of the
task that the caller has read: one that arrives late does not cancel a task that was replayed, or enqueued again under
its id, since.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from .delivery.due_set import CANCEL_REQUEST
from .derived_tasks import confirm_successor
from .envelope import is_task_id
from .errors import DecryptionError, Refused, TaskNotFound, Unavailable
from .junk import report_once, shown_bytes
from .keys import GROUP, RESERVED, Namespace, Partition
from .partitions.retention import registered_retention
from .records import State, read_record
from .shared_config import read_seconds
from .transport.clients import is_denied
from .transport.gateway import Gateway
from .transport.scripts import queue_script

_CANCEL: Final = queue_script("cancel")
_READ: Final = ("at", "entry", "token", "replays")


async def cancel_task(gateway: Gateway, partition: Partition, task_id: str, *, retention: float) -> State:
    """Cancel a task, and end its turn if it is one of a session. See `TaskHandle.cancel`.

    If the caller dies in between, another call, or the session sweeper, ends the turn.

    Args:
        retention: Seconds for which the record is kept, if the namespace has no setting.
    """
    answer = None
    if _CANCEL.name not in gateway.denied:
        try:
            answer = await _cancel(gateway, partition, task_id, retention)
        except Refused as error:
            if not is_denied(error):
                raise
            gateway.denied.add(_CANCEL.name)
    if answer is None:
        return await _request(gateway, partition, task_id)
    if answer == b"missing":
        raise _not_found(gateway, partition, task_id)
    return State.RUNNING if answer == b"requested" else State(answer.decode())


async def answer_requests(
    gateway: Gateway, partition: Partition, requests: Sequence[bytes], *, retention: float
) -> None:
    """Cancel the tasks whose cancellation was requested, and remove the requests. retention: see `cancel_task`."""
    for request in requests:
        task_id, *life = request.removeprefix(CANCEL_REQUEST).split(b" ")
        try:
            if is_task_id(name := task_id.decode("ascii", "replace")):
                await _cancel(gateway, partition, name, retention, life)
        except Unavailable:
            raise  # the request stays
        except Exception as error:  # noqa: BLE001 - one request must not keep the others waiting
            report_once(f"could not cancel a task of queue {partition.queue!r} for {shown_bytes(request)}: {error}")
        await gateway.command("ZREM", partition.due, request)


async def _cancel(
    gateway: Gateway, partition: Partition, task_id: str, retention: float, life: Sequence[bytes] | None = None
) -> bytes:
    """Cancel a task that no worker runs, else ask its worker; return the answer of the script.

    life: that of the task, None for any; another one is left alone, and the answer is `changed`.
    """
    ready, record, steps, log, inbox, control = partition.run_keys(task_id)
    keys = [ready, record, steps, log, partition.due, partition.retentions, inbox, control, partition.timeline]
    namespace = Namespace(partition.namespace)
    answer = b"changed"
    while answer == b"changed":  # the task was replaced or replayed after it was read
        stored, (source, *found) = await gateway.pipeline(
            [("HGET", namespace.config, "result_ttl"), ("HMGET", record, "handed_from", *_READ, "waits")]
        )
        *read, waits = (value or b"" for value in found)
        if life is not None and life != _life(*read):
            return answer
        ttl = read_seconds(stored) or retention
        if source is not None:  # a cancelled successor must not be stored again once its record has expired
            await confirm_successor(gateway, namespace, source.decode())
        kept = (round(ttl * 1000), registered_retention(ttl))
        args = (GROUP, RESERVED, task_id, *kept, *read, namespace.worker_channel(""), waits)
        answer = await gateway.run(_CANCEL, [*keys, *_versions(partition, waits.decode())], args)
    if answer == b"cancelled" and task_id.startswith("turn-"):
        await _end_turn(gateway, partition, task_id)
    return answer


async def _request(gateway: Gateway, partition: Partition, task_id: str) -> State:
    """Request the cancellation of a task, and return the state that it has now. A request that is repeated is one."""
    record = await read_record(gateway, partition, task_id)
    if record is None:
        raise _not_found(gateway, partition, task_id)
    if not record.state.terminal:
        read = (value or b"" for value in await gateway.command("HMGET", partition.record(task_id), *_READ))
        member = CANCEL_REQUEST + b" ".join((task_id.encode(), *_life(*read)))
        await gateway.pipeline(
            [("ZADD", partition.due, 0, member), ("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "due")]
        )
    return record.state


def _life(at: bytes, entry: bytes, token: bytes, replays: bytes) -> list[bytes]:
    """Return what differs between the tasks of an id, and between a task and its replay: as cancel.lua compares it."""
    return [at or entry.partition(b"-")[0], token, replays]


def _not_found(gateway: Gateway, partition: Partition, task_id: str) -> TaskNotFound:
    return TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")


async def _end_turn(gateway: Gateway, partition: Partition, task_id: str) -> None:
    """End the turn of a cancelled task. A task of a forgotten session is deleted."""
    from .sessions.address import SessionAddress, parse_turn_id
    from .sessions.errors import TurnEarly
    from .sessions.removal import forget_task
    from .sessions.turns import SessionTurnEnd, end_turn

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
