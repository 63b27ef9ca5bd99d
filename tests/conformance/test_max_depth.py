"""`max_depth`: a queue is not deeper than its limit, whatever producers do at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure import Unique
from perdure.queues import Gateway, Namespace, Partition, Producer, QueueFull, State
from perdure.queues.delivery.settlement import release
from perdure.queues.depth import MaxDepth, read_depths
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import DEFAULT_PAYLOAD_LIMIT, Envelope, EnvelopeTemplate, TaskMessage
from perdure.queues.handle import serving
from perdure.queues.inspection.views import list_queues
from perdure.queues.limits.definition import Limit
from perdure.queues.partitions.resharding import set_partitions
from perdure.queues.partitions.router import PartitionRouter
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import promote, read, read_one, worker
from tests.support.delivery_calls import SETTLING
from tests.support.limited_tasks import message, publish, use

pytestmark = pytest.mark.integration


async def add(producer: Producer, number: int = 0, **options: Any) -> Any:
    return await producer.enqueue("t", {"n": number}, queue="default", **options)


async def add_many(producer: Producer, count: int, **options: Any) -> Any:
    return await producer.enqueue_many("t", [{"n": number} for number in range(count)], queue="default", **options)


async def test_a_full_queue_refuses_and_says_its_depth(producer: Producer, partition: Partition) -> None:
    for number in range(3):
        await add(producer, number, max_depth=3)
    with pytest.raises(QueueFull, match=r"queue 'default' is full: 3 tasks wait, and max_depth is 3") as raised:
        await add(producer, max_depth=3)
    assert (raised.value.queue, raised.value.depth, raised.value.max_depth) == ("default", 3, 3)
    assert raised.value.stored == ()
    assert await read_depths(producer.gateway, [partition]) == [3]
    await add(producer)  # a call without a limit


async def test_tasks_that_a_worker_runs_leave_room(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await add_many(producer, 2, max_depth=2)
    taken = await read_one(await worker(gateway, partition))
    handle = await add(producer, max_depth=2)
    with pytest.raises(QueueFull):
        await add(producer, max_depth=2)
    await release(gateway, taken, None, data=None)  # it waits again, for the consumer of released messages
    assert await read_depths(gateway, [partition]) == [3]
    with pytest.raises(QueueFull, match="3 tasks wait"):
        await add(producer, max_depth=3)
    assert (await handle.record()).state is State.QUEUED


async def test_the_depth_is_the_one_that_lists_of_queues_show(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await add_many(producer, 4)
    consumer = await worker(gateway, partition)
    _, second = await read(consumer, 2)
    await release(gateway, second, None, data=None)
    (stats,) = await list_queues(gateway, namespace, "default")
    assert await read_depths(gateway, [partition]) == [stats.depth]


async def test_a_batch_is_stored_as_far_as_there_is_room_and_in_order(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    with pytest.raises(QueueFull, match=r"4 tasks of the call were stored, 3 were not") as raised:
        await add_many(producer, 7, max_depth=4)
    assert raised.value.depth == 4
    stored = [await producer.find(task_id, "default") for task_id in raised.value.stored]
    assert [(await handle.record()).args for handle in stored if handle is not None] == [
        b'{"n":%d}' % number for number in range(4)
    ]
    assert await read_depths(gateway, [partition]) == [4]


async def test_a_stream_yields_the_stored_tasks_before_it_raises(producer: Producer) -> None:
    async def endless() -> AsyncIterator[dict[str, int]]:
        number = 0
        while True:
            yield {"n": number}
            number += 1

    handles = []
    with pytest.raises(QueueFull):
        async for handle in producer.enqueue_stream("t", endless(), queue="default", max_depth=700):
            handles.append(handle)  # noqa: PERF401 - those before the error count
    assert len(handles) == 700
    assert (await handles[-1].record()).args == b'{"n":699}'


async def test_a_stream_of_unique_tasks_yields_the_stored_ones_before_it_raises(producer: Producer) -> None:
    rule, handles = Unique("while_queued", by="n"), []
    with pytest.raises(QueueFull):
        async for handle in producer.enqueue_stream(
            "t", [{"n": number} for number in range(5)], queue="default", max_depth=3, unique=rule
        ):
            handles.append(handle)  # noqa: PERF401 - those before the error count
    assert len(handles) == 3
    with pytest.raises(QueueFull) as raised:
        await producer.enqueue_many("t", [{"n": n} for n in range(6)], queue="default", max_depth=3, unique=rule)
    assert sorted(raised.value.stored) == sorted(handle.id for handle in handles)


async def test_a_known_id_needs_no_room(producer: Producer) -> None:
    """A call that is repeated since its reply was lost finds its tasks."""
    ids = ["a", "b"]
    for task_id in ids:
        await add(producer, task_id=task_id, max_depth=2)
    again = await add(producer, task_id="b", max_depth=2)
    assert (again.id, again.existed) == ("b", True)
    with pytest.raises(QueueFull):
        await add(producer, task_id="c", max_depth=2)


async def test_scheduled_tasks_count_for_those_with_a_delay(gateway: Gateway, producer: Producer) -> None:
    await add_many(producer, 2, delay=60, max_depth=3)
    await add(producer, max_depth=3)
    with pytest.raises(QueueFull):
        await add(producer, delay=60, max_depth=3)
    await add_many(producer, 2, max_depth=3)  # scheduled ones may be days away
    with pytest.raises(QueueFull):
        await add(producer, max_depth=3)


async def test_due_tasks_are_never_refused(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handles = await add_many(producer, 3, delay=0.001, max_depth=3)
    await add_many(producer, 3, max_depth=3)
    await asyncio.sleep(0.01)
    await promote(gateway, partition)
    assert [(await handle.record()).state for handle in handles] == [State.QUEUED] * 3
    assert await read_depths(gateway, [partition]) == [6]


async def test_large_arguments_obey(producer: Producer, partition: Partition) -> None:
    large = {"text": "x" * DEFAULT_PAYLOAD_LIMIT}
    many = [{"text": "a"}, large, {"text": "b"}, large, {"text": "c"}]
    with pytest.raises(QueueFull) as raised:
        await producer.enqueue_many("t", many, queue="default", max_depth=3)
    assert len(raised.value.stored) == 3
    assert await read_depths(producer.gateway, [partition]) == [3]
    with pytest.raises(QueueFull):
        await producer.enqueue("t", large, queue="default", delay=60, max_depth=3)


async def test_a_waiting_call_is_stored_as_room_appears(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    consumer = await worker(gateway, partition)
    adding = asyncio.create_task(add_many(producer, 9, max_depth=2, when_full="wait", wait_limit=30))
    order: list[bytes] = []
    while len(order) < 9:
        assert (await read_depths(gateway, [partition]))[0] <= 2
        for delivery in await read(consumer):
            order.append(delivery.fields[b"args"])
            await SETTLING["succeed"](gateway, delivery, Envelope.decode(delivery.fields[b"env"]).id)
    assert order == [b'{"n":%d}' % number for number in range(9)]
    assert len(await adding) == 9


async def test_a_wait_has_a_limit(producer: Producer) -> None:
    await add_many(producer, 2)
    with pytest.raises(QueueFull, match=r"is full after 0\.05 s: 2 tasks wait, and max_depth is 2"):
        await add(producer, max_depth=2, when_full="wait", wait_limit=0.05)


async def test_many_producers_at_once_do_not_exceed_one_partition(producer: Producer, partition: Partition) -> None:
    async def add_ten() -> int:
        try:
            return len(await add_many(producer, 10, max_depth=25))
        except QueueFull as error:
            return len(error.stored)

    assert sum(await asyncio.gather(*(add_ten() for _ in range(8)))) == 25
    assert await read_depths(producer.gateway, [partition]) == [25]


async def test_partitions_share_the_limit_and_an_ordering_key_may_have_all_of_it(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 4)
    for number in range(40):
        await add(producer, number, key="tenant", max_depth=40)
    with pytest.raises(QueueFull) as raised:
        await add(producer, key="tenant", max_depth=40)
    assert raised.value.depth == 40
    with pytest.raises(QueueFull):
        await add(producer, key="another", max_depth=40)
    with pytest.raises(QueueFull):
        await add_many(producer, 100, max_depth=40)


async def test_producers_of_several_partitions_exceed_the_limit_by_little(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 4)
    calls = [add(producer, number, max_depth=50, key=f"k{number % 7}") for number in range(200)]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in done if isinstance(one, BaseException)} == {QueueFull}
    partitions = [namespace.partition("default", index) for index in range(5)]
    depth = sum(await read_depths(gateway, partitions))
    assert depth == sum(not isinstance(one, QueueFull) for one in done)
    assert 50 <= depth <= 100


async def test_a_refused_unique_task_leaves_its_key_free(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    rule = Unique("while_running", by="n")
    first = await add(producer, 1, unique=rule, max_depth=1)
    with pytest.raises(QueueFull):
        await add(producer, 2, unique=rule, max_depth=1)
    again = await add(producer, 1, unique=rule, max_depth=1)  # it stores nothing, so it needs no room
    assert (again.id, again.existed) == (first.id, True)
    delivery = await read_one(await worker(gateway, partition))
    other = await asyncio.wait_for(add(producer, 2, unique=rule, max_depth=1), 5)
    assert not other.existed
    await release(gateway, delivery, None, data=None)


async def test_a_task_that_replaces_another_needs_no_room(producer: Producer, partition: Partition) -> None:
    rule = Unique("while_queued", by="n", keep="last")
    first = await add(producer, 1, unique=rule, max_depth=1)
    second = await add(producer, 1, unique=rule, max_depth=1)
    assert second.id != first.id
    assert (await first.record()).state is State.CANCELLED


async def test_many_unique_tasks_are_stored_as_far_as_there_is_room(producer: Producer) -> None:
    with pytest.raises(QueueFull) as raised:
        await add_many(producer, 5, unique=Unique("while_running", by="n"), max_depth=2)
    assert len(raised.value.stored) == 2


async def test_a_waiting_unique_task_holds_no_claim(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    rule = Unique("while_running", by="n")
    await add(producer, 1)
    adding = asyncio.create_task(add(producer, 2, unique=rule, max_depth=1, when_full="wait", wait_limit=30))
    other = await asyncio.wait_for(add(producer, 2, unique=rule), 5)  # without a limit
    found = await asyncio.wait_for(adding, 5)
    assert found.id == other.id


async def test_a_handler_does_not_wait_for_the_queue_of_its_own_worker(producer: Producer) -> None:
    await add(producer)

    def opens(*_: Any) -> Any:
        raise AssertionError

    async with serving(["default"], opens, lambda *_: None):
        await add(producer, max_depth=1, when_full="wait", wait_limit=60)
        with pytest.raises(QueueFull):
            await add(producer, max_depth=1)


async def test_bytes_that_arrive_late_store_nothing_beyond_the_limit(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """A script that is repeated counts its own tasks of the first time, and knows them."""
    ids = ["a", "b", "c"]
    messages: list[TaskMessage] = [EnvelopeTemplate("t").message(b"{}", task_id=task_id) for task_id in ids]
    keys = [partition.ready, partition.closed, partition.timeline, *(partition.record(one.id) for one in messages)]
    args: list[Any] = [part for one in messages for part in (one.id, one.envelope, one.arguments, "", "")]
    assert await gateway.run(queue_script("enqueue"), keys, [*args, 2]) == [1, 1, -3]
    assert await gateway.run(queue_script("enqueue"), keys, [*args, 2]) == [0, 0, -3]


async def test_a_call_without_a_limit_sends_none(producer: Producer, partition: Partition) -> None:
    enqueuer = BatchEnqueuer(producer.gateway, None, 0.0)  # type: ignore[arg-type]  # unused
    message = EnvelopeTemplate("t").message(b"{}")
    assert await enqueuer._send(partition, [message]) == [1]
    assert MaxDepth(1).published() == {"max_depth": 1, "wait_limit": 0.0}


class _RoomForTheSecond:
    """Room that appears after the first task of a call had none."""

    def __init__(self) -> None:
        self.numbers = [0]

    async def first(self, partition: Partition) -> int:
        return self.numbers.pop() if self.numbers else 100

    async def next(self, partition: Partition) -> int | None:
        return None

    async def is_there(self) -> bool:
        return False

    async def wait(self) -> bool:
        return False

    def stored(self, partition: Partition, count: int) -> None: ...

    def full(self) -> QueueFull:
        return QueueFull("default", 1, 1)


async def test_a_later_task_of_an_ordered_key_is_not_stored_before_one_without_room(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """Also in a partition that is closed, and takes the tasks of the key since one of them has not ended."""
    session = Limit("session", running=1, by="user", ordered=True)
    uses = [use(session, "ada")]
    await publish(gateway, namespace, session)
    router = PartitionRouter(gateway, namespace, "default")
    await BatchEnqueuer(gateway, router, 0.0).one(message(uses))
    await set_partitions(gateway, namespace, "default", 2)
    await BatchEnqueuer(gateway, router, 0.0).one(EnvelopeTemplate("t").message(b"{}"))  # it finds out
    enqueuer = BatchEnqueuer(gateway, router, 0.0, room=_RoomForTheSecond())
    with pytest.raises(QueueFull):
        _ = [batch async for batch in enqueuer.all([message(uses, "second"), message(uses, "third")])]
    assert await producer.find("third", "default") is None
    assert await producer.find("second", "default") is None
