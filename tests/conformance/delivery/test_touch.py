"""The touch of a partition: a lease expires only while workers reach the partition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from perdure.queues import Gateway, Namespace, Partition, Producer
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.heartbeat import renew_lease
from perdure.queues.delivery.leases import Delivery, Touch
from perdure.queues.delivery.quarantine_store import quarantine
from perdure.queues.delivery.settlement import release
from perdure.queues.keys import GROUP, SUSPECTS

from tests.support.consumers import age, claim_all, ids, pending, read, read_one, worker
from tests.support.task_places import dump

LEASE = 60.0
GAP = 31_000
"""Milliseconds: more than half of the lease."""


async def pass_unattended(gateway: Gateway, partition: Partition, milliseconds: int = GAP) -> None:
    """Let time pass in which no worker touches the partition. Negative: the clock of Redis is set back."""
    seen = int(await gateway.command("GET", partition.seen))
    await gateway.command("SET", partition.seen, seen - milliseconds, "PX", 60_000)


async def claim(gateway: Gateway, consumer: Consumer, delivery: Delivery) -> None:
    assert await claim_all(consumer) == []


async def touch(gateway: Gateway, consumer: Consumer, delivery: Delivery) -> None:
    await consumer.touch(delivery.partition)


async def heartbeat(gateway: Gateway, consumer: Consumer, delivery: Delivery) -> None:
    """Renew the lease of another delivery."""
    await renew_lease(gateway, delivery, "y", LEASE)


TOUCHES: dict[str, Callable[[Gateway, Consumer, Delivery], Awaitable[None]]] = {
    "sweep": claim,
    "promoter": touch,
    "heartbeat": heartbeat,
}


@pytest.mark.parametrize("kind", TOUCHES)
@pytest.mark.parametrize("away", [GAP, 24 * 3_600_000, -GAP])
async def test_a_gap_or_a_step_back_of_the_clock_restarts_every_lease(
    gateway: Gateway, partition: Partition, producer: Producer, kind: str, away: int
) -> None:
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    first, other = await read(await worker(gateway, partition), 2)
    b = await worker(gateway, partition, name="b", lease=LEASE)
    await age(gateway, first)
    await pass_unattended(gateway, partition, away)
    await TOUCHES[kind](gateway, b, other)
    assert await claim_all(b) == []
    (entry, owner, idle, count), _ = await pending(gateway, partition)
    assert (entry, owner, count) == (first.entry, "a", 1)
    assert idle < GAP
    await age(gateway, first)  # its worker has not renewed it for a lease since
    (claimed,) = await claim_all(b)
    assert (claimed.entry, claimed.count) == (first.entry, 2)


async def test_a_lease_expires_while_workers_reach_the_partition(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    b = await worker(gateway, partition, name="b", lease=LEASE)
    await age(gateway, delivery)
    for away in (GAP - 2_000, 2_000 - GAP):  # a touch follows each
        await pass_unattended(gateway, partition, away)
        await b.touch(partition)
    assert [one.entry for one in await claim_all(b)] == [delivery.entry]


async def test_leases_are_restarted_where_no_touch_is_known(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """After an hour without a worker, or after an earlier version."""
    await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    b = await worker(gateway, partition, name="b", lease=LEASE)
    await age(gateway, delivery)
    await gateway.command("DEL", partition.seen)
    assert await claim_all(b) == []
    assert 0 < await gateway.command("PTTL", partition.seen) <= 3_600_000


async def test_released_messages_are_claimed_after_a_gap_at_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    running, suspect, released = await read(await worker(gateway, partition), 3)
    await quarantine(gateway, suspect, handles[1].id)
    await release(gateway, released, None, data=None)
    b = await worker(gateway, partition, name="b", lease=LEASE)
    await age(gateway, running)
    await gateway.command("XCLAIM", partition.ready, GROUP, SUSPECTS, 0, suspect.entry, "IDLE", 3_600_000, "JUSTID")
    await pass_unattended(gateway, partition)
    assert ids(await claim_all(b)) == [handles[2].id]
    assert {owner for _, owner, _, _ in await pending(gateway, partition)} == {"a", "b", SUSPECTS}


async def test_a_restart_changes_neither_owners_nor_counts(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """More deliveries than one call restarts, of several workers."""
    await producer.enqueue_many("t", [{}] * 600, queue="default")
    for name, most in (("a", 290), ("b", 310)):
        for delivery in await read(await worker(gateway, partition, name=name), most):
            await age(gateway, delivery)
    await gateway.command("XCLAIM", partition.ready, GROUP, "c", 0, (await pending(gateway, partition))[5][0])
    before = await dump(gateway, namespace)
    await pass_unattended(gateway, partition)
    touched: list[Touch] = []
    c = await worker(gateway, partition, name="c", on_touch=lambda _, touch: touched.append(touch))
    while touched[-1].restarted:
        await c.touch(partition)
    assert await dump(gateway, namespace) == before
    assert max(idle for _, _, idle, _ in await pending(gateway, partition)) < GAP
    assert [one.restarted for one in touched] == [250, 250, 100, 0]
    assert touched[0].gap > GAP / 1000 > touched[1].gap


async def test_nothing_is_claimed_before_the_last_lease_is_restarted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 300, queue="default")
    deliveries = await read(await worker(gateway, partition), 300)
    for delivery in deliveries:
        await age(gateway, delivery)
    await release(gateway, deliveries[0], None, data=None)
    b = await worker(gateway, partition, name="b", lease=LEASE)
    await pass_unattended(gateway, partition)
    cursor, claimed = await b.claim(partition, "0-0", 300)
    assert (cursor, claimed) == ("-", [])
    cursor, claimed = await b.claim(partition, cursor, 300)
    assert (cursor, [one.entry for one in claimed]) == ("0-0", [deliveries[0].entry])


async def test_a_gap_in_a_restart_restarts_every_lease_again(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 300, queue="default")
    first, *_ = await read(await worker(gateway, partition), 300)
    touched: list[Touch] = []
    b = await worker(gateway, partition, name="b", lease=LEASE, on_touch=lambda _, touch: touched.append(touch))
    await gateway.command("DEL", partition.seen)
    await b.touch(partition)
    await age(gateway, first)
    time, _, start = (await gateway.command("GET", partition.seen)).decode().partition(" ")
    await gateway.command("SET", partition.seen, f"{int(time) - GAP} {start}", "PX", 60_000)
    assert await claim_all(b) == []
    assert [one.restarted for one in touched][1:4] == [250, 250, 50]


async def test_a_touch_before_the_group_exists_is_stored(gateway: Gateway, partition: Partition) -> None:
    b = await worker(gateway, partition, name="b")
    await gateway.command("DEL", partition.ready, partition.seen)
    await b.touch(partition)
    assert await gateway.command("EXISTS", partition.seen, partition.ready) == 1
