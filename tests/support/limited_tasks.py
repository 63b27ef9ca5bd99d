"""Tasks that have limits, stored without an app, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from perdure.queues import Gateway, Namespace, Partition
from perdure.queues.admission import Admission, Admitted
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import EnvelopeTemplate, LimitUse, TaskMessage
from perdure.queues.keys import gate_of
from perdure.queues.limits.definition import Limit, key_digest
from perdure.queues.limits.store import LimitStore, ReleaseRequest, token_member
from perdure.queues.partitions.router import PartitionRouter

LIFE = 30.0


def use(limit: Limit, key: object = None, cost: int = 1) -> LimitUse:
    """Return the use of a limit under a key; None for a limit without keys."""
    return LimitUse(limit.name, key_digest(limit.name, None if key is None else [key]), cost, limit.flags)


async def publish(gateway: Gateway, namespace: Namespace, *limits: Limit) -> None:
    await LimitStore(gateway, namespace).publish(list(limits), "app", starts=True)


def message(uses: Sequence[LimitUse], task_id: str | None = None, **arguments: Any) -> TaskMessage:
    """Return the message of a task, as a producer encodes it."""
    return EnvelopeTemplate("t").message(orjson.dumps(arguments), task_id=task_id).with_limits(tuple(uses))


async def enqueue(
    gateway: Gateway,
    namespace: Namespace,
    uses: Sequence[LimitUse],
    *task_ids: str,
    delay: float = 0,
    queue: str = "default",
) -> list[Partition]:
    """Enqueue a task under each of these ids; return their partitions."""
    router = PartitionRouter(gateway, namespace, queue)
    enqueuer = BatchEnqueuer(gateway, router, delay)
    found: list[Partition] = []
    async for batch in enqueuer.all(message(uses, task_id) for task_id in task_ids):
        found += [partition for _, partition in batch]
    return found


async def admit(gateway: Gateway, partition: Partition, **more: Any) -> Admitted:
    """Admit the tasks of a partition that have their turn."""
    return await Admission(gateway, Namespace(partition.namespace), life=LIFE, **more).admit_due(partition)


async def admit_hinted(gateway: Gateway, namespace: Namespace, hints: Sequence[str]) -> int:
    """Admit the tasks that hints of a release name; return their number."""
    return await Admission(gateway, namespace, life=LIFE).admit_now(hints)


async def waiting(gateway: Gateway, partition: Partition, uses: Sequence[LimitUse]) -> list[str]:
    """Return the members of a waiting list, by their places."""
    found = await gateway.command("ZRANGE", partition.limited(gate_of(uses).key_id), 0, -1)
    return [task_id.decode() for task_id in found]


async def ready(gateway: Gateway, partition: Partition) -> list[str]:
    """Return the ids of the tasks on the ready stream."""
    found = await gateway.command("XRANGE", partition.ready, "-", "+")
    return [orjson.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"env"])["id"] for _, fields in found]


async def nonce(gateway: Gateway, partition: Partition, task_id: str) -> str:
    """Return the nonce of the token of an admitted task."""
    entry = await gateway.command("HGET", partition.record(task_id), "entry")
    ((_, fields),) = await gateway.command("XRANGE", partition.ready, entry, entry)
    return str(dict(zip(fields[::2], fields[1::2], strict=True))[b"token"].decode())


async def release(
    gateway: Gateway, namespace: Namespace, partition: Partition, uses: Sequence[LimitUse], task_id: str, token: str
) -> list[str]:
    """Release the token of a task; return the hints."""
    member = token_member(partition, task_id, token)
    return (await LimitStore(gateway, namespace).release([ReleaseRequest(member, tuple(uses))])).hints


async def holders(gateway: Gateway, namespace: Namespace, limit: Limit) -> int:
    """Return how many tokens of a limit are held."""
    (view,) = await LimitStore(gateway, namespace).read([limit.name])
    return view.held
