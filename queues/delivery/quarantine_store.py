"""Crashes: the report of a dead worker, and the quarantine of tasks whose workers keep dying.

A supervisor that saw a worker process end reports it with `report_crash`: then no task waits for the lease.

A quarantined message stays in the pending list, under a consumer name that is not a worker's. If no worker takes it
from there, it is claimed after a lease, like the messages of every silent consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import orjson

from ..envelope import Envelope
from ..errors import LeaseLost, Refused, UnreadableEnvelope
from ..keys import GROUP, RELEASED, SUSPECTS, Namespace, Partition
from ..partitions.resharding import load_routes
from ..partitions.route import SINGLE
from ..presence import withdraw
from ..transport.backoff import retry_while_unavailable
from ..transport.clients import is_missing_group
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import pairs, queue_script
from .leases import RELEASED_IDLE_MS, Delivery

_CLEAR = queue_script("clear_quarantined")
_CRASH = queue_script("report_crash")
_QUARANTINE = queue_script("quarantine")
_REMOVE = queue_script("remove_consumer")
_TAKE = queue_script("take_quarantined")

CRASH_WINDOW_MS: Final = 600_000
"""Milliseconds within which crashes of a task count although it made progress between them."""

_MAX_DELIVERIES: Final = 1000
"""Deliveries of one worker in one partition that are read: more than a worker has slots."""


class QuarantinedDelivery(NamedTuple):
    """Result of `take_quarantined`. delivery: None if there was nothing to run. more: whether others are waiting."""

    delivery: Delivery | None
    more: bool


async def quarantine(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    """Put a task into quarantine, for a worker that runs it alone, at no cost. Raises `LeaseLost`."""
    partition = delivery.partition
    keys = [partition.ready, partition.nudge, partition.record(task_id)]
    if not await gateway.run(_QUARANTINE, keys, [*delivery.fence, SUSPECTS]):
        raise LeaseLost(task_id, "quarantine")


async def take_quarantined(gateway: Gateway, partition: Partition, worker: str) -> QuarantinedDelivery:
    """Take the quarantined message that has waited longest in a partition.

    Raises:
        Unavailable: The server or only its reply was lost. Then a message may be pending on this worker: see
            `Consumer.recover_own`.
    """
    reply = await gateway.run_once(_TAKE, [partition.ready], [GROUP, worker, SUSPECTS])
    if not reply:
        return QuarantinedDelivery(None, more=False)
    entry, count, fields, more = reply
    if entry is None:  # the message was deleted by hand
        return QuarantinedDelivery(None, more=bool(more))
    return QuarantinedDelivery(Delivery(partition, entry, worker, count, pairs(fields), claimed=True), more=bool(more))


async def clear_quarantined(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    """End the quarantine of a task that has survived the probation time. Raises `LeaseLost`."""
    partition = delivery.partition
    if not await gateway.run(_CLEAR, [partition.ready, partition.record(task_id)], [*delivery.fence]):
        raise LeaseLost(task_id, "clearance")


class CrashReport(NamedTuple):
    """Number of deliveries that a dead worker held, which any worker may claim now."""

    deliveries: int


class _Held(NamedTuple):
    """A delivery of the dead worker. task_id: None if its message cannot be read."""

    entry: bytes
    delivery_count: int
    task_id: str | None


async def report_crash(
    gateway: Gateway,
    namespace: Namespace,
    queues: Sequence[str],
    worker: str,
    *,
    exit_status: str,
    steps: Mapping[str, str],
) -> CrashReport:
    """Release every delivery of a worker whose process has ended. Retries while Redis is unavailable.

    Args:
        queues: Queues of the worker.
        exit_status: Such as "SIGKILL" or "exit code 1".
        steps: Steps in flight by task id, as far as they are known.
    """
    held = await retry_while_unavailable(lambda: _held_by(gateway, namespace, queues, worker))
    for partition, deliveries in held.items():
        await retry_while_unavailable(partial(_report, gateway, partition, worker, deliveries, exit_status, steps))
    await retry_while_unavailable(lambda: _remove(gateway, namespace, list(held), worker))
    return CrashReport(sum(map(len, held.values())))


async def _held_by(
    gateway: Gateway, namespace: Namespace, queues: Sequence[str], worker: str
) -> dict[Partition, list[_Held]]:
    """Return the worker's deliveries by partition. Covers closed partitions of its queues, too."""
    routes = await load_routes(gateway, namespace)
    partitions = [namespace.partition(queue, index) for queue in queues for index in routes.get(queue, SINGLE).indexes]
    found = await asyncio.gather(*(_pending(gateway, partition, worker) for partition in partitions))
    return dict(zip(partitions, found, strict=True))


async def _pending(gateway: Gateway, partition: Partition, worker: str) -> list[_Held]:
    try:
        pending = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", _MAX_DELIVERIES, worker)
    except Refused as error:
        if is_missing_group(error):
            return []
        raise
    messages = await gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry, *_ in pending])
    return [
        _Held(entry, count, _task_id(pairs(found[0][1])) if found else None)
        for (entry, _, _, count), found in zip(pending, messages, strict=True)
    ]


def _task_id(fields: Mapping[bytes, bytes]) -> str | None:
    try:
        return Envelope.decode(fields.get(b"env", b"")).id
    except UnreadableEnvelope:
        return None


async def _report(
    gateway: Gateway,
    partition: Partition,
    worker: str,
    held: Sequence[_Held],
    exit_status: str,
    steps: Mapping[str, str],
) -> None:
    reports = []
    for one in held:
        evidence: dict[str, object] = {"how": exit_status, "worker": worker}
        if one.task_id is not None and one.task_id in steps:
            evidence["step"] = steps[one.task_id]
        task_id = one.task_id or f"entry-{one.entry.decode()}"
        keys = [partition.ready, partition.record(task_id), partition.log(task_id), partition.nudge]
        data = orjson.dumps(evidence) if one.task_id else b""
        args: list[Argument] = [GROUP, worker, one.entry, one.delivery_count, RELEASED, RELEASED_IDLE_MS, data]
        reports.append(gateway.run(_CRASH, keys, args))
    await asyncio.gather(*reports)


async def _remove(gateway: Gateway, namespace: Namespace, partitions: Sequence[Partition], worker: str) -> None:
    """Remove the dead worker from the groups and from the registry of workers."""
    await asyncio.gather(
        *(gateway.run(_REMOVE, [one.ready, one.nudge], [GROUP, worker]) for one in partitions), return_exceptions=True
    )
    await withdraw(gateway, namespace, worker)
