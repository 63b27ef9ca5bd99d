"""The facts of an explanation: the record, the end of the log, the workers of the queue and the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..catalog import Catalog, read_catalog
from ..delivery.lost_tasks import Place, find_places
from ..delivery.step_pages import MAX_COUNTED, recorded_steps
from ..doubts import Doubt, read_doubts
from ..errors import Refused
from ..event_log import TaskEvent, opened_events
from ..inbox import InboxMessage, read_inbox
from ..inspection.views import QueueStats, partition_stats
from ..keys import Namespace, Partition
from ..open_joins import JoinProgress, read_progress
from ..pauses import Pauses, load_pauses
from ..presence import WorkerInfo, list_workers
from ..records import Record, State, read_record
from ..shared_config import load_config
from ..supervisors import paused_supervisors
from ..transport.gateway import Gateway
from ..transport.scripts import milliseconds
from ..waits import OpenWait, read_waits

T = TypeVar("T")

_EVENTS: Final = 30
"""Last events of the log that are read."""

if TYPE_CHECKING:
    from .limited_task import LimitedTask

_LEASE: Final = 15.0
"""Lease of a worker that does not publish it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a task at one time, as Redis has them.

    Attributes:
        now: Time of the read, in milliseconds of Redis' clock.
        events: Last events of the log, newest first.
        steps: Number of recorded steps.
        crash: Evidence of the last crash that a supervisor reported.
        returned: Deliveries of the message that ended without an outcome and without a crash.
        cancel: Whether a running task was asked to end.
        expires_at: Time at which the record expires; None while the task is live.
        lease: Seconds after which others claim the task of a silent worker.
        workers: Registered workers, catalog, paused: names of paused supervisors, pauses of queues and tasks. None if
            this user may not read them; what the user may not read of the task is empty.
        stats: Numbers of the partition, if the task is queued.
        doubts: Risky steps that were cut off, unless the task runs or has ended.
        senders: Senders of its unread messages that can be read, if the task is parked.
        unreadable: Its unread messages that cannot be read, with their problem, if the task is parked.
        waits: Its open waits for answers, if the task is parked.
        joins: Joins that it waits for, if it is parked.
        place: Whether the task is where its record says, as one script has seen it; None if this user may not look.
    """

    record: Record
    now: int
    events: Sequence[TaskEvent] = ()
    steps: int = 0
    crash: Mapping[str, Any] = field(default_factory=dict)
    returned: int = 0
    cancel: bool = False
    expires_at: int | None = None
    lease: float = _LEASE
    workers: Sequence[WorkerInfo] | None = ()
    catalog: Catalog | None = None
    paused: Sequence[str] | None = ()
    pauses: Pauses | None = None
    stats: QueueStats | None = None
    doubts: Sequence[Doubt] = ()
    senders: Sequence[str] | None = ()
    place: Place | None = Place.SOUND
    unreadable: Sequence[InboxMessage] = ()
    waits: Sequence[OpenWait] = ()
    joins: Sequence[JoinProgress] = ()
    limited: LimitedTask | None = None


async def read_facts(gateway: Gateway, partition: Partition, task_id: str) -> Facts | None:
    """Read the facts of a task, None if there is no record. Takes two round trips, and two more if it is queued."""
    namespace = Namespace(partition.namespace)
    (record, place), task, workers, config, (paused, pauses), catalog = await asyncio.gather(
        asyncio.gather(read_record(gateway, partition, task_id), _allowed(find_places(gateway, partition, [task_id]))),
        _read_task(gateway, partition, task_id),
        _allowed(list_workers(gateway, namespace)),
        _allowed(load_config(gateway, namespace)),
        asyncio.gather(_allowed(paused_supervisors(gateway, namespace)), _allowed(load_pauses(gateway, namespace))),
        _allowed(read_catalog(gateway, namespace)),
    )
    if record is None:
        return None
    cancel, entries, fields, ttl, time = (
        unknown if isinstance(reply, Refused) else reply for reply, unknown in zip(task, _UNKNOWN, strict=True)
    )
    now = milliseconds(time)
    steps, doubtful = int(fields), record.reason == "in_doubt"
    if 0 < steps <= MAX_COUNTED:
        names = await gateway.command("HKEYS", partition.steps(task_id))
        steps = recorded_steps(names)
        doubtful = any(name.startswith(b"i:") for name in names)
    if record.state in (State.RUNNING, State.SUCCEEDED, State.CANCELLED):
        doubtful = False
    lease = published_lease(workers or (), partition.queue)
    parked = record.state is State.WAITING
    inbox = await _allowed(_unread(gateway, partition, task_id)) if parked else ()
    return Facts(
        record,
        now,
        opened_events(entries, task_id, record.cipher),
        steps,
        record.crash,
        record.returned,
        bool(cancel),
        now + int(ttl) if int(ttl) > 0 else None,
        config.leases(lease)[1] if config else lease,
        workers,
        catalog,
        paused,
        pauses,
        await _allowed(partition_stats(gateway, partition)) if record.state is State.QUEUED else None,
        await read_doubts(gateway, partition, task_id) if doubtful else (),
        None if inbox is None else [message.sender for message in inbox if message.problem is None],
        place[0] if place else None,
        [message for message in inbox or () if message.problem is not None],
        await _open_waits(gateway, partition, task_id) if parked and "answer" in (record.waits or "") else (),
        await _allowed(read_progress(gateway, partition, task_id)) or () if parked else (),
        await _limited(gateway, partition, task_id) if record.state is State.LIMITED else None,
    )


async def _limited(gateway: Gateway, partition: Partition, task_id: str) -> LimitedTask | None:
    from .limited_task import read_limited_task  # of tasks with limits only

    return await _allowed(read_limited_task(gateway, partition, task_id))


async def _open_waits(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[OpenWait]:
    found = await _allowed(read_waits(gateway, partition, task_id))
    return () if found is None else found.open


async def _unread(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[InboxMessage]:
    """Return the unread messages of a task, without corrections and without their content."""
    found = read_inbox(gateway, partition, task_id)
    return [replace(message, content=None) async for message in found if not message.kind]


def published_lease(workers: Sequence[WorkerInfo], queue: str) -> float:
    """Return the longest lease of the live workers of a queue; without any, of those that it had."""
    leases = [(one.presumed_dead, one.lease) for one in workers if queue in one.queues and one.lease is not None]
    return max([lease for lost, lease in leases if not lost] or [lease for _, lease in leases], default=_LEASE)


_UNKNOWN: Final[tuple[Any, ...]] = (0, (), 0, -1, (b"0", b"0"))
"""Values in place of replies that the server refuses, as to a user who may only enqueue."""


def _read_task(gateway: Gateway, partition: Partition, task_id: str) -> Awaitable[list[Any]]:
    """Read what the record does not say: request to cancel, log, steps, TTL, and the time."""
    record = partition.record(task_id)
    return gateway.pipeline_each(
        [
            ("HEXISTS", partition.control(task_id), "cancel"),
            ("XREVRANGE", partition.log(task_id), "+", "-", "COUNT", _EVENTS),
            ("HLEN", partition.steps(task_id)),
            ("PTTL", record),
            ("TIME",),
        ],
        node_of=record,
    )


async def _allowed(read: Awaitable[T]) -> T | None:
    """Return what was read; None if the server refuses it, as to a user who may only enqueue."""
    try:
        return await read
    except Refused:
        return None
