"""Admission: a task that has limits waits in a list, and starts with its tokens, whatever happens to its movers."""

from __future__ import annotations

import asyncio

import pytest
from perdure.queues import Gateway, Namespace, Partition, State, read_record
from perdure.queues.admission import Admission
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import LimitUse
from perdure.queues.handle import cancel_task
from perdure.queues.keys import gate_of
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.store import LimitStore, ReleaseRequest, TakeRequest, token_member
from perdure.queues.partitions.resharding import PartitionStatus, partition_status, set_partitions
from perdure.queues.partitions.router import PartitionRouter

from tests.support.consumers import make_due, promote, read, read_one, worker
from tests.support.delivery_calls import SETTLING
from tests.support.limited_tasks import (
    admit,
    admit_hinted,
    enqueue,
    holders,
    message,
    nonce,
    publish,
    ready,
    release,
    use,
    waiting,
)
from tests.support.task_places import DUE, LIMITED, READY, places

pytestmark = pytest.mark.integration

BOTH = Limit("openai", total=20, running=1, by="tenant")
ALL = Limit("all", total=1)
ORDERED = Limit("session", running=1, by="user", ordered=True)


async def test_a_limited_task_waits_in_a_list(gateway: Gateway, namespace: Namespace) -> None:
    uses = [use(BOTH, "a")]
    (partition,) = await enqueue(gateway, namespace, uses, "x")
    assert await places(gateway, partition, "x") == [LIMITED]
    record = await read_record(gateway, partition, "x")
    assert record is not None
    assert (record.state, record.waits, record.task) == (State.LIMITED, "limit openai", "t")
    assert record.enqueued_at is not None


async def test_the_mover_admits_as_many_as_the_limit_has_room_for(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, BOTH)
    uses = [use(BOTH, "a")]
    partition = (await enqueue(gateway, namespace, uses, "x", "y"))[0]
    admitted = await admit(gateway, partition)
    assert admitted.number == 1
    assert admitted.wait is not None
    assert admitted.wait > 0
    assert await ready(gateway, partition) == ["x"]
    assert await places(gateway, partition, "x") == [READY]
    assert await places(gateway, partition, "y") == [LIMITED]
    assert await holders(gateway, namespace, BOTH) == 1
    delivery = await read_one(await worker(gateway, partition))
    assert delivery.fields[b"token"]
    assert not delivery.has_history


async def test_a_limit_that_no_worker_has_published_lets_none_start(gateway: Gateway, namespace: Namespace) -> None:
    (partition,) = await enqueue(gateway, namespace, [use(BOTH, "a")], "x")
    assert (await admit(gateway, partition)).number == 0
    await publish(gateway, namespace, BOTH)
    await gateway.command("ZADD", partition.rings, 0, "openai")
    assert (await admit(gateway, partition)).number == 1


async def test_a_release_admits_the_next_one(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, BOTH)
    uses = [use(BOTH, "a")]
    partition = (await enqueue(gateway, namespace, uses, "x", "y", "z"))[0]
    await admit(gateway, partition)
    hints = await release(gateway, namespace, partition, uses, "x", await nonce(gateway, partition, "x"))
    assert len(hints) == 1
    assert await admit_hinted(gateway, namespace, hints) == 1
    assert await ready(gateway, partition) == ["x", "y"]
    assert await waiting(gateway, partition, uses) == ["z"]


async def test_each_key_has_its_turn(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, ALL, Limit("tenant", rate="1000/s", by="tenant"))
    tenant = Limit("tenant", rate="1000/s", by="tenant")
    many, few = [use(ALL), use(tenant, "many")], [use(ALL), use(tenant, "few")]
    partition = (await enqueue(gateway, namespace, many, *(f"many-{number}" for number in range(5))))[0]
    await enqueue(gateway, namespace, few, *(f"few-{number}" for number in range(3)))
    order: list[str] = []
    await admit(gateway, partition)
    while len(found := await ready(gateway, partition)) > len(order):
        order = found
        uses = many if found[-1].startswith("many") else few
        token = await nonce(gateway, partition, found[-1])
        hints = await release(gateway, namespace, partition, uses, found[-1], token)
        await admit_hinted(gateway, namespace, hints)
    assert order == ["many-0", "few-0", "many-1", "few-1", "many-2", "few-2", "many-3", "many-4"]


async def test_a_key_with_many_tasks_does_not_hold_up_the_others(gateway: Gateway, namespace: Namespace) -> None:
    tenant = Limit("tenant", rate="100000/s", by="tenant")
    await publish(gateway, namespace, ALL, tenant)
    crowd = [use(ALL), use(tenant, "crowd")]
    partition = (await enqueue(gateway, namespace, crowd, *(f"crowd-{number}" for number in range(1000))))[0]
    keys = {name: [use(ALL), use(tenant, name)] for name in ("b", "c", "d", "e", "f", "g", "h", "i", "j")}
    for name, uses in keys.items():
        await enqueue(gateway, namespace, uses, *(f"{name}-{number}" for number in range(10)))
    await admit(gateway, partition)
    started = [""]
    while sum(not name.startswith("crowd") for name in started[1:]) < 90:
        last = (await ready(gateway, partition))[-1]
        assert last != started[-1]
        started.append(last)
        uses = keys.get(last[0], crowd) if last[1] == "-" else crowd
        hints = await release(gateway, namespace, partition, uses, last, await nonce(gateway, partition, last))
        await admit_hinted(gateway, namespace, hints)
    # each of the nine keys had its tenth turn before the crowd had many more
    assert len(started[1:]) - 90 < 20


async def test_two_movers_admit_each_task_once(gateway: Gateway, namespace: Namespace) -> None:
    wide = Limit("wide", total=50)
    await publish(gateway, namespace, wide)
    uses = [use(wide)]
    partition = (await enqueue(gateway, namespace, uses, *(f"x{number}" for number in range(30))))[0]
    found = await asyncio.gather(*(admit(gateway, partition) for _ in range(4)))
    assert sum(one.number for one in found) == 30
    assert sorted(await ready(gateway, partition)) == sorted(f"x{number}" for number in range(30))
    assert await holders(gateway, namespace, wide) == 30


async def test_a_retry_waits_for_the_limit_again(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, BOTH)
    uses = [use(BOTH, "a")]
    (partition,) = await enqueue(gateway, namespace, uses, "x", delay=60)
    assert await places(gateway, partition, "x") == [DUE]
    await make_due(gateway, partition, "x")
    assert await promote(gateway, partition, "x") == 0
    assert await places(gateway, partition, "x") == [LIMITED]
    assert (await admit(gateway, partition)).number == 1
    assert await places(gateway, partition, "x") == [READY]


async def test_an_ordered_task_waits_for_the_end_of_the_one_before(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, ORDERED)
    uses = [use(ORDERED, "u")]
    partition = (await enqueue(gateway, namespace, uses, "x", "y"))[0]
    assert (await admit(gateway, partition)).number == 1
    assert await waiting(gateway, partition, uses) == ["x", "y"]
    await release(gateway, namespace, partition, uses, "x", await nonce(gateway, partition, "x"))
    key_id, ring = gate_of(uses)
    hints = [f"default/{partition.index}/{key_id}/{ring}"]
    assert await admit_hinted(gateway, namespace, hints) == 0
    consumer = await worker(gateway, partition)
    (delivery,) = await read(consumer)
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await waiting(gateway, partition, uses) == ["y"]
    assert (await admit(gateway, partition)).number == 1


async def test_a_token_lives_as_long_as_its_task_waits_on_the_stream(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    """Else each admitted task would start without its token, and return to the list: none would ever run."""
    await publish(gateway, namespace, ALL)
    await worker(gateway, partition)
    seconds, _ = await gateway.command("TIME", node_of=partition.ready)
    await gateway.command("XADD", partition.ready, f"{int(seconds) * 1000 - 100_000}-1", "env", "{}")
    await enqueue(gateway, namespace, [use(ALL)], "x")
    assert (await admit(gateway, partition)).number == 1
    (view,) = await LimitStore(gateway, namespace).read([ALL.name])
    assert view.holders[0].left > 2 * 100


async def test_an_ordered_key_stays_in_a_closed_partition_until_its_tasks_have_ended(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    await publish(gateway, namespace, ORDERED)
    uses, router = [use(ORDERED, "u")], PartitionRouter(gateway, namespace, "default")
    enqueuer = BatchEnqueuer(gateway, router, 0.0)
    assert await enqueuer.one(message(uses, "x")) == partition
    await set_partitions(gateway, namespace, "default", 3)
    assert await enqueuer.one(message(uses, "y")) == partition
    async for batch in enqueuer.all([message(uses, "z"), message([use(ORDERED, "v")], "other")]):
        assert [place == partition for _, place in batch] == [True, False]
    consumer = await worker(gateway, partition)
    for name in ("x", "y", "z"):
        assert await partition_status(gateway, partition) is not PartitionStatus.EMPTY
        assert (await admit(gateway, partition)).number == 1
        delivery = await read_one(consumer)
        assert delivery.task_id == name
        token = await nonce(gateway, partition, name)
        await SETTLING["succeed"](gateway, delivery, name)
        await release(gateway, namespace, partition, uses, name, token)
    assert await enqueuer.one(message(uses, "later")) != partition
    assert await partition_status(gateway, partition) is PartitionStatus.EMPTY


async def attend(gateway: Gateway, partition: Partition) -> None:
    """Let a partition have a worker that promotes its tasks."""
    await gateway.command("SET", partition.promote_lock, "worker", "PX", 60_000)


async def released(
    gateway: Gateway, namespace: Namespace, partition: Partition, uses: list[LimitUse], task_id: str
) -> int:
    """Release the token of a task, and start what waited for it, as a worker does."""
    store = LimitStore(gateway, namespace)
    member = token_member(partition, task_id, await nonce(gateway, partition, task_id))
    return await Admission(gateway, namespace, life=30).start_waiting(
        await store.release([ReleaseRequest(member, uses)])
    )


@pytest.mark.parametrize("waiters", [1, 5])
async def test_a_place_that_a_cancelled_waiter_leaves_is_offered_to_the_next_one(
    gateway: Gateway, namespace: Namespace, waiters: int
) -> None:
    await publish(gateway, namespace, ALL, BOTH)
    (first,) = await enqueue(gateway, namespace, [use(ALL)], "x")
    await admit(gateway, first)
    cancelled: dict[str, Partition] = {}
    for name in map(str, range(waiters)):
        (cancelled[name],) = await enqueue(gateway, namespace, [use(ALL), use(BOTH, name)], name)
        await admit(gateway, cancelled[name])
    (last,) = await enqueue(gateway, namespace, [use(ALL)], "last", queue="other")
    await admit(gateway, last)
    for name, partition in cancelled.items():
        await cancel_task(gateway, partition, name, retention=60)
    await attend(gateway, last)
    await attend(gateway, first)
    assert await released(gateway, namespace, first, [use(ALL)], "x") == 1
    assert await ready(gateway, last) == ["last"]


async def test_a_place_that_a_waiter_cannot_use_is_offered_to_the_next_one(
    gateway: Gateway, namespace: Namespace
) -> None:
    another = Limit("another", total=1)
    await publish(gateway, namespace, ALL, another)
    (first,) = await enqueue(gateway, namespace, [use(ALL)], "x")
    (second,) = await enqueue(gateway, namespace, [use(another)], "y")
    await admit(gateway, first)
    await admit(gateway, second)
    (both,) = await enqueue(gateway, namespace, [use(ALL), use(another)], "both")
    await admit(gateway, both)
    (last,) = await enqueue(gateway, namespace, [use(ALL)], "last", queue="other")
    await admit(gateway, last)
    for partition in (first, second, both, last):
        await attend(gateway, partition)
    assert await released(gateway, namespace, first, [use(ALL)], "x") == 1
    assert await ready(gateway, last) == ["last"]
    assert await released(gateway, namespace, last, [use(ALL)], "last") == 0
    assert await released(gateway, namespace, second, [use(another)], "y") == 1
    assert "both" in await ready(gateway, both)


async def test_a_place_that_a_dead_process_leaves_is_offered_to_the_next_one(
    gateway: Gateway, namespace: Namespace
) -> None:
    await publish(gateway, namespace, ALL)
    (partition,) = await enqueue(gateway, namespace, [use(ALL)], "x")
    await admit(gateway, partition)
    for name in ("dead", "gone"):
        await LimitStore(gateway, namespace).take([TakeRequest(name, [use(ALL)], waiter=f"memory/{name}")])
    await enqueue(gateway, namespace, [use(ALL)], "last")
    await admit(gateway, partition)
    await attend(gateway, partition)
    assert await released(gateway, namespace, partition, [use(ALL)], "x") == 1
    assert (await ready(gateway, partition))[-1] == "last"


async def test_a_queue_without_a_worker_gets_no_token(gateway: Gateway, namespace: Namespace) -> None:
    """The token would wait on its stream until it expires; the task has its turn when a worker is there."""
    await publish(gateway, namespace, ALL)
    (first,) = await enqueue(gateway, namespace, [use(ALL)], "x")
    await admit(gateway, first)
    (other,) = await enqueue(gateway, namespace, [use(ALL)], "y", queue="other")
    await admit(gateway, other)
    await enqueue(gateway, namespace, [use(ALL)], "z")
    await admit(gateway, first)
    await attend(gateway, first)
    assert await released(gateway, namespace, first, [use(ALL)], "x") == 1
    assert (await ready(gateway, first))[-1] == "z"
    assert await ready(gateway, other) == []
    assert await released(gateway, namespace, first, [use(ALL)], "z") == 0
    assert (await admit(gateway, other)).number == 1
