"""The due set: no task runs before its time, and a due task moves once, whichever worker promotes it."""

from __future__ import annotations

import asyncio

import pytest
from perdure.queues import Gateway, Namespace, Partition, Producer, State
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import (
    age,
    claim_all,
    claim_one,
    ids,
    make_due,
    needs_one_server,
    promote,
    read,
    read_one,
    worker,
)
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import DUE, PENDING, READY, all_places, dump, places


async def nudges(gateway: Gateway, partition: Partition) -> int:
    return int(await gateway.command("XLEN", partition.nudge))


async def test_an_empty_due_set_has_no_due_time(gateway: Gateway, partition: Partition) -> None:
    assert await promote_due(gateway, partition) == (0, None)


async def test_a_task_stays_before_its_due_time(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    before = await dump(gateway, namespace)
    moved, wait = await promote_due(gateway, partition)
    assert moved == 0
    assert wait is not None
    assert 58 < wait <= 60
    assert await dump(gateway, namespace) == before


async def test_the_wait_lasts_until_the_earliest_due_time(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    for delay in (300, 20, 100):
        await producer.enqueue("t", delay=delay, queue="default")
    _, wait = await promote_due(gateway, partition)
    assert wait is not None
    assert 18 < wait <= 20


async def test_a_due_task_becomes_a_message(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", delay=60, queue="default")
    assert await promote(gateway, partition, "x") == 1
    assert await places(gateway, partition, "x") == [READY]
    record = await handle.record()
    assert (record.state, record.due_at, record.task, record.args) == (State.QUEUED, None, "t", b'{"n":1}')
    delivery = await read_one(await worker(gateway, partition))
    assert delivery.has_history
    assert delivery.fields[b"args"] == b'{"n":1}'
    assert ids([delivery]) == ["x"]


async def test_a_promoted_task_keeps_its_payload_in_the_record(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await promote(gateway, partition, "x")
    assert await gateway.command("HMGET", partition.record("x"), "args", "due") == [b"{}", None]


async def test_tasks_are_promoted_in_the_order_of_their_due_times(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    for name in ("late", "early", "middle"):
        await producer.enqueue("t", task_id=name, delay=60, queue="default")
    for score, name in enumerate(("early", "middle", "late")):
        await gateway.command("ZADD", partition.due, score, name)
    await promote_due(gateway, partition)
    assert ids(await read(await worker(gateway, partition), 10)) == ["early", "middle", "late"]


async def test_only_due_tasks_move(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="now", delay=60, queue="default")
    await producer.enqueue("t", task_id="later", delay=60, queue="default")
    await make_due(gateway, partition, "now")
    moved, wait = await promote_due(gateway, partition)
    assert moved == 1
    assert wait is not None
    assert 58 < wait <= 60
    assert await all_places(gateway, partition, ["now", "later"]) == {"now": [READY], "later": [DUE]}


async def test_many_tasks_are_promoted_in_batches(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handles = await producer.enqueue_many("t", [{}] * 450, delay=60, queue="default")
    await make_due(gateway, partition, *(handle.id for handle in handles))
    assert await promote_due(gateway, partition) == (200, 0.0)
    assert await promote_due(gateway, partition) == (200, 0.0)
    assert await promote_due(gateway, partition) == (50, None)
    found = await all_places(gateway, partition, [handle.id for handle in handles])
    assert set(map(tuple, found.values())) == {(READY,)}


async def test_concurrent_promoters_move_each_task_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 150, delay=60, queue="default")
    await make_due(gateway, partition, *(handle.id for handle in handles))
    rounds = await asyncio.gather(*(promote_due(gateway, partition) for _ in range(8)))
    assert sum(moved for moved, _ in rounds) == 150
    assert await gateway.command("XLEN", partition.ready) == 150
    found = await all_places(gateway, partition, [handle.id for handle in handles])
    assert set(map(tuple, found.values())) == {(READY,)}


async def test_a_promoter_that_dies_between_its_two_calls_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    before = await dump(gateway, namespace)
    assert (await gateway.run(queue_script("due"), [partition.due], [100]))[0] == [b"x"]
    assert await dump(gateway, namespace) == before
    assert await promote(gateway, partition) == 1


@pytest.mark.parametrize("meanwhile", ["promoted", "read", "cancelled", "postponed"])
async def test_a_task_that_changed_between_the_two_calls_is_not_promoted(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, meanwhile: str
) -> None:
    handle = await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    due = (await gateway.run(queue_script("due"), [partition.due], [100]))[0]
    match meanwhile:
        case "promoted":
            await promote(gateway, partition)
        case "read":
            await promote(gateway, partition)
            await read_one(await worker(gateway, partition))
        case "cancelled":
            await handle.cancel()
        case "postponed":
            await gateway.command("ZADD", partition.due, 10**14, "x")
    before = await dump(gateway, namespace)
    keys = [partition.due, partition.ready, partition.record("x")]
    assert await gateway.run(queue_script("promote"), keys, due) == 0
    assert await dump(gateway, namespace) == before


async def test_an_id_without_a_record_leaves_the_due_set(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await gateway.command("DEL", partition.record("x"))
    assert await promote(gateway, partition, "x") == 0
    assert await places(gateway, partition, "x") == []
    assert await gateway.command("EXISTS", partition.record("x"), partition.due) == 0


async def test_a_lost_reply_promotes_once(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(queue_script("promote").sha.encode())
        await promote_due(lossy, partition)
        assert line.lost == 1
    assert await places(gateway, partition, "x") == [READY]


async def test_a_new_earliest_due_time_wakes_a_worker(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", delay=60, queue="default")
    assert await nudges(gateway, partition) == 1
    await producer.enqueue("t", delay=120, queue="default")
    assert await nudges(gateway, partition) == 1
    await producer.enqueue("t", delay=30, queue="default")
    assert await nudges(gateway, partition) == 2
    a = await worker(gateway, partition)
    taken = await a.read(10, block=None)
    assert (taken.due, taken.claimable, taken.deliveries) == (True, False, [])


async def test_nudges_do_not_accumulate(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    for delay in range(100, 50, -1):
        await producer.enqueue("t", delay=delay, queue="default")
    assert await nudges(gateway, partition) == 16


async def test_a_promoted_task_starts_with_a_new_delivery_count(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """A promoted task is a new message: one claim counts as one crash, whatever its former count."""
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await promote(gateway, partition, "x")
    first = await read_one(await worker(gateway, partition))
    await age(gateway, first)
    second = await claim_one(await worker(gateway, partition, name="b"))
    assert (first.count, second.count) == (1, 2)
    assert await places(gateway, partition, "x") == [PENDING]


async def test_tasks_that_are_promoted_for_a_claim_are_claimed_and_not_read(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """The claim is the first delivery of each."""
    a, b = [await worker(gateway, partition, name=name) for name in ("a", "b")]
    for task_id in ("x", "y"):
        await producer.enqueue("t", task_id=task_id, delay=60, queue="default")
    await make_due(gateway, partition, "x", "y")
    assert await promote_due(gateway, partition, for_claim=True) == (2, None)
    assert await all_places(gateway, partition, ["x", "y"]) == {"x": [PENDING], "y": [PENDING]}
    assert await read(b, 10) == []
    assert [(one.count, one.claimed) for one in await claim_all(a)] == [(1, True)] * 2
    await producer.enqueue("t", task_id="z", queue="default")
    assert [one.count for one in await read(b, 10)] == [1]


@pytest.mark.parametrize("group", [True, False])
async def test_tasks_that_are_promoted_for_a_claim_come_after_the_messages_that_wait(
    gateway: Gateway, partition: Partition, producer: Producer, group: bool
) -> None:
    """group: whether a worker has created the consumer group."""
    if group:
        await worker(gateway, partition)
    await producer.enqueue("t", task_id="first", queue="default")
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    assert await promote_due(gateway, partition, for_claim=True) == (1, None)
    assert await all_places(gateway, partition, ["first", "x"]) == {"first": [READY], "x": [READY]}
    a = await worker(gateway, partition)
    assert await claim_all(a) == []
    assert len(await read(a, 10)) == 2


async def test_a_promotion_for_a_claim_whose_reply_was_lost_moves_each_task_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_one_server(gateway, "replies get lost on a line to one server")
    a = await worker(gateway, partition)
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(queue_script("promote").sha.encode())
        assert await promote_due(lossy, partition, for_claim=True) == (0, None)
        assert line.lost == 1
    assert (await claim_one(a)).count == 1
    assert await gateway.command("XLEN", partition.ready) == 1
