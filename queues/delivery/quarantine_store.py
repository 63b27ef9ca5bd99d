"""Suspects: tasks whose worker died. Any of them may be what killed it, so each is run alone until it is cleared.

They wait in the pending list under a name that is no worker's. Nothing is ever lost there: what nobody takes from it
is claimed, like everything a silent consumer holds, once a lease has passed.

Reporting that a worker process is dead, for a supervisor that saw it end: nothing waits for the lease then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import orjson

from ..envelope import Envelope
from ..errors import LeaseLost, Refused, UnreadableEnvelope
from ..keys import GROUP, SUSPECTS, Namespace, Partition
from ..partitions import SINGLE, load_routes
from ..presence import withdraw
from ..transport import Gateway, is_missing_group, pairs, queue_script, retry_while_unavailable
from .leases import Delivery

__all__ = ["CrashReport", "QuarantinedDelivery", "clear_quarantined", "quarantine", "report_crash", "take_quarantined"]

_ASIDE = queue_script("quarantine")
_SUSPECT = queue_script("take_quarantined")
_ACQUIT = queue_script("clear_quarantined")


class QuarantinedDelivery(NamedTuple):
    """What `take_suspect` found. delivery: None where nothing was to be run. more: whether others are waiting."""

    delivery: Delivery | None
    more: bool


async def quarantine(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    """Leave a suspect to a worker that runs it alone, at no cost. Raises `LeaseLost`."""
    partition = delivery.partition
    if not await gateway.run(_ASIDE, [partition.ready, partition.nudge], [*delivery.fence, SUSPECTS]):
        raise LeaseLost(task_id, "setting aside")


async def take_quarantined(gateway: Gateway, partition: Partition, worker: str) -> QuarantinedDelivery:
    """Take the suspect that has waited longest in a partition.

    Raises `Unavailable` also where only the reply was lost: then a suspect may be this worker's, see `Consumer.adopt`.
    """
    # As text and not by its digest, for a digest the server does not know would have it asked again.
    ask = ("EVAL", _SUSPECT.source, 1, partition.ready, GROUP, worker, SUSPECTS)
    reply = await gateway.command(*ask, repeatable=False)
    if not reply:
        return QuarantinedDelivery(None, more=False)
    entry, count, fields, more = reply
    if entry is None:  # somebody deleted the message by hand
        return QuarantinedDelivery(None, more=bool(more))
    return QuarantinedDelivery(Delivery(partition, entry, worker, count, pairs(fields), claimed=True), more=bool(more))


async def clear_quarantined(gateway: Gateway, delivery: Delivery, task_id: str, crashes: int) -> None:
    """Clear a suspect that has recorded a new step. crashes: how many are counted by now. Raises `LeaseLost`."""
    partition = delivery.partition
    keys = [partition.ready, partition.record(task_id), partition.log(task_id)]
    if not await gateway.run(_ACQUIT, keys, [*delivery.fence, crashes]):
        raise LeaseLost(task_id, "clearing of suspicion")


_CRASH = queue_script("report_crash")
_FORGET = queue_script("remove_consumer")

_MOST: Final = 1000
"""Deliveries of one worker in one partition that are looked at: more than a worker has slots."""


class CrashReport(NamedTuple):
    """What a dead worker held: how many deliveries, all of them suspects now."""

    deliveries: int


class _Held(NamedTuple):
    """One delivery of the dead worker. times: its delivery count. task_id: None where its message cannot be read."""

    entry: bytes
    times: int
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
    """Set aside everything that a worker holds, which must be dead for certain: its process has ended.

    queues: those it worked on. how: its end, such as "SIGKILL" or "exit code 1". doing: by task id, the step in flight,
    as far as it is known. While Redis is away it is asked again: this returns when all is reported.
    """
    held = await retry_while_unavailable(lambda: _held_by(gateway, namespace, queues, worker))
    # Seen as a whole before anything is moved: whether the worker held one delivery is asked of all its partitions.
    alone = sum(map(len, held.values())) == 1
    for partition, deliveries in held.items():
        await retry_while_unavailable(
            partial(_report, gateway, partition, worker, deliveries, alone, exit_status, steps)
        )
    await retry_while_unavailable(lambda: _forget(gateway, namespace, list(held), worker))
    return CrashReport(sum(map(len, held.values())))


async def _held_by(
    gateway: Gateway, namespace: Namespace, queues: Sequence[str], worker: str
) -> dict[Partition, list[_Held]]:
    """What is pending on the worker, by partition; of every partition of its queues, those that were left included."""
    routes = await load_routes(gateway, namespace)
    partitions = [namespace.partition(queue, index) for queue in queues for index in routes.get(queue, SINGLE).indexes]
    found = await asyncio.gather(*(_pending(gateway, partition, worker) for partition in partitions))
    return dict(zip(partitions, found, strict=True))


async def _pending(gateway: Gateway, partition: Partition, worker: str) -> list[_Held]:
    try:
        pending = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", _MOST, worker)
    except Refused as error:
        if is_missing_group(error):
            return []
        raise
    messages = await gateway.pipeline([("XRANGE", partition.ready, entry, entry) for entry, *_ in pending])
    return [
        _Held(entry, times, _task_id(pairs(found[0][1])) if found else None)
        for (entry, _, _, times), found in zip(pending, messages, strict=True)
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
    alone: bool,
    how: str,
    doing: Mapping[str, str],
) -> None:
    reports = []
    for one in held:
        known: dict[str, object] = {"how": how, "worker": worker, "alone": alone}
        if one.task_id is not None and one.task_id in doing:
            known["step"] = doing[one.task_id]
        task_id = one.task_id or f"entry-{one.entry.decode()}"
        keys = [partition.ready, partition.record(task_id), partition.log(task_id), partition.nudge]
        told = orjson.dumps(known) if one.task_id else b""
        reports.append(gateway.run(_CRASH, keys, [GROUP, worker, one.entry, one.times, SUSPECTS, int(alone), told]))
    await asyncio.gather(*reports)


async def _forget(gateway: Gateway, namespace: Namespace, partitions: Sequence[Partition], worker: str) -> None:
    """Take the dead worker's name off the groups and off the list of workers."""
    await asyncio.gather(
        *(gateway.run(_FORGET, [one.ready, one.nudge], [GROUP, worker]) for one in partitions), return_exceptions=True
    )
    await withdraw(gateway, namespace, worker)
