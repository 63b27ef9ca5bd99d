"""Consumers for the tests of queues, which share a gateway and have no runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import NOT_STARTED, Delivery, Leases, OnTouch, RunStatus, ignore_touch
from perdure.queues.delivery.stream_reader import PerNodeReader, SingleNodeReader
from perdure.queues.envelope import Envelope
from perdure.queues.keys import GROUP
from perdure.queues.partitions.resharding import sync_route
from perdure.queues.transport.blocking import BlockingConnection
from perdure.queues.transport.pipelining import Argument

LONG_AGO = 3_600_000
"""Idle milliseconds that `age` sets: longer than any lease."""


class SharedReader(BlockingConnection):
    """Reader that does not block, on the connection of the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._shared = gateway

    async def read(self, *command: Argument) -> Any:
        return await self._shared.command(*command, repeatable=False)

    async def interrupt(self) -> None:
        """Do nothing: no read blocks."""


class SharedReaders(PerNodeReader):
    """Reader that does not block, for a cluster."""

    def _reader(self, partition: Partition) -> BlockingConnection:
        return SharedReader(self._gateway)


def needs_server(gateway: Gateway, reason: str) -> None:
    """Skip on fakeredis, and say what it lacks."""
    if gateway.address.url == "redis://borrowed":
        pytest.skip(f"fakeredis: {reason}")


def needs_one_server(gateway: Gateway, reason: str) -> None:
    """Skip on fakeredis and on a cluster, and say what they lack."""
    if not gateway.address.url.startswith("unix:"):
        pytest.skip(reason)


async def worker(
    gateway: Gateway,
    *partitions: Partition,
    name: str = "a",
    lease: float = 60.0,
    leases: Leases | None = None,
    on_touch: OnTouch = ignore_touch,
) -> Consumer:
    """Return a consumer that does not block. With `lease=0` it claims every pending message."""
    apart = gateway.clustered and len(partitions) > 1
    reading = SharedReaders(gateway, name) if apart else SingleNodeReader(gateway, SharedReader(gateway), name)
    consumer = Consumer(gateway, reading, partitions, name, lease, Leases() if leases is None else leases, on_touch)
    await consumer.create_groups()
    for partition in partitions:
        await consumer.touch(partition)
        await sync_route(gateway, Namespace(partition.namespace), partition.queue)
    return consumer


async def read(consumer: Consumer, most: int = 1) -> list[Delivery]:
    return (await consumer.read(most, block=None)).deliveries


async def read_one(consumer: Consumer) -> Delivery:
    (delivery,) = await read(consumer)
    return delivery


async def claim_all(consumer: Consumer) -> list[Delivery]:
    """Claim every message that can be claimed on the first queue of a consumer."""
    claimed: list[Delivery] = []
    cursor = "0-0"
    while True:
        cursor, more = await consumer.claim(consumer.partitions[0], cursor, 100)
        claimed += more
        if cursor == "0-0":
            return claimed


async def claim_one(consumer: Consumer) -> Delivery:
    (delivery,) = await claim_all(consumer)
    return delivery


async def age(gateway: Gateway, delivery: Delivery, by: int = LONG_AGO) -> None:
    """Expire the lease of a delivery without waiting: same consumer and count, idle for `by` milliseconds."""
    await gateway.command(
        "XCLAIM",
        delivery.partition.ready,
        GROUP,
        delivery.worker,
        0,
        delivery.entry,
        "IDLE",
        by,
        "RETRYCOUNT",
        delivery.count,
        "JUSTID",
    )


async def take_over(gateway: Gateway, delivery: Delivery, name: str = "thief") -> Delivery:
    """Claim a message for another consumer after its lease has expired."""
    await age(gateway, delivery)
    thief = await worker(gateway, delivery.partition, name=name)
    return next(one for one in await claim_all(thief) if one.entry == delivery.entry)


async def make_due(gateway: Gateway, partition: Partition, *task_ids: str) -> None:
    """Make scheduled tasks due without waiting."""
    for task_id in task_ids:
        await gateway.command("ZADD", partition.due, "XX", 1, task_id)


async def promote(gateway: Gateway, partition: Partition, *task_ids: str) -> int:
    """Make the tasks due and move them onto the stream."""
    await make_due(gateway, partition, *task_ids)
    moved, _ = await promote_due(gateway, partition)
    return moved


async def pending(gateway: Gateway, partition: Partition) -> list[tuple[bytes, str, int, int]]:
    """Return the pending list: entry, consumer, idle milliseconds, delivery count."""
    found = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 10_000)
    return [(entry, owner.decode(), idle, count) for entry, owner, idle, count in found]


async def consumers(gateway: Gateway, stream: str) -> set[str]:
    """Return the names of the consumers in the group of the stream."""
    found = await gateway.command("XINFO", "CONSUMERS", stream, GROUP)
    return {dict(zip(flat[::2], flat[1::2], strict=True))[b"name"].decode() for flat in found}


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    """Return the ids of the delivered tasks."""
    return [Envelope.decode(delivery.fields[b"env"]).id for delivery in deliveries]


class Held:
    """A holder of a delivery, with callbacks."""

    def __init__(
        self,
        delivery: Delivery,
        task_id: str,
        lost: Callable[[], None] | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self.delivery = delivery
        self.id = task_id
        self.tokens = None
        self._lost = lost
        self._cancel = cancel

    def status(self) -> RunStatus:
        return NOT_STARTED

    def on_lost(self) -> None:
        if self._lost is not None:
            self._lost()

    def on_cancel(self) -> None:
        if self._cancel is not None:
            self._cancel()
