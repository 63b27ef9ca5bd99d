"""Clean-up tasks: the script that ends a task enqueues one, once; a task that has one is cancelled by a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from perdure.deadletter.burial import Evidence, bury
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State, TaskHandle
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, cancelled, cleanup_id, reschedule, succeed
from perdure.queues.envelope import Envelope, EnvelopeTemplate, TaskMessage

from tests.support.consumers import claim_all, promote, read_one, take_over, worker
from tests.support.delivery_calls import SETTLING, add_entries

End = Callable[[Gateway, Delivery, TaskMessage], Awaitable[object]]

ENDS: dict[str, End] = {
    "succeeded": lambda gateway, delivery, message: succeed(
        gateway, delivery, "x", b"1", Counters(), ran=0.0, ttl=60.0, cleanup=message
    ),
    "cancelled": lambda gateway, delivery, message: cancelled(
        gateway, delivery, "x", Counters(), ran=0.0, ttl=60.0, cleanup=message
    ),
    "dead": lambda gateway, delivery, message: bury(
        gateway,
        delivery,
        "x",
        task="t",
        reason=Reason.TIMEOUT,
        evidence=Evidence.of(TimeoutError()),
        counters=Counters(),
        cleanup=message,
    ),
}


def message_for(delivery: Delivery) -> TaskMessage:
    task_id = cleanup_id("x", delivery)
    return TaskMessage(task_id, Envelope(id=task_id, task="clean_up").encode(), b'{"task_id":"x"}', None, True)


@pytest.fixture
async def delivery(gateway: Gateway, producer: Producer, partition: Partition) -> Delivery:
    await producer.enqueue("t", task_id="x", queue="default")
    return await read_one(await worker(gateway, partition))


@pytest.mark.parametrize("state", ENDS)
async def test_the_end_of_a_task_enqueues_its_clean_up_task_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery, state: str
) -> None:
    message = message_for(delivery)
    for _ in range(2):  # the reply was lost
        await ENDS[state](gateway, delivery, message)
    assert await gateway.command("HGET", partition.record("x"), "state") == state.encode()
    assert await gateway.command("HGET", partition.record("x"), "cleanup") == message.id.encode()
    assert await gateway.command("XLEN", partition.ready) == 1
    assert await gateway.command("ZSCORE", partition.timeline, message.id) is not None
    assert await gateway.command("PTTL", partition.record(message.id)) == -1
    found = await read_one(await worker(gateway, partition, name="b"))
    assert (found.task_id, found.has_history) == (message.id, False)
    assert found.fields == {b"env": message.envelope, b"args": message.arguments}
    await succeed(gateway, found, message.id, b"null", Counters(), ran=0.0, ttl=60.0)
    handle = await producer.find(message.id)
    assert handle is not None
    assert await handle.status() is State.SUCCEEDED


@pytest.mark.parametrize("state", ENDS)
async def test_a_lost_lease_enqueues_nothing(
    gateway: Gateway, partition: Partition, delivery: Delivery, state: str
) -> None:
    message = message_for(delivery)
    await take_over(gateway, delivery)
    with pytest.raises(LeaseLost):
        await ENDS[state](gateway, delivery, message)
    assert await gateway.command("EXISTS", partition.record(message.id)) == 0
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_burial_of_a_cancelled_task_enqueues_nothing(
    gateway: Gateway, partition: Partition, delivery: Delivery, producer: Producer
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.RUNNING
    message = message_for(delivery)
    assert await ENDS["dead"](gateway, delivery, message) is False
    assert await gateway.command("EXISTS", partition.record(message.id)) == 0
    await ENDS["cancelled"](gateway, delivery, message)
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_record_of_the_same_id_is_left_alone(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    message = message_for(delivery)
    await gateway.command("HSET", partition.record(message.id), "state", "mine")
    await ENDS["succeeded"](gateway, delivery, message)
    assert await gateway.command("HGETALL", partition.record(message.id)) == [b"state", b"mine"]
    assert await gateway.command("XLEN", partition.ready) == 0
    await gateway.command("DEL", partition.record(message.id))


async def test_each_life_of_an_id_has_a_clean_up_task_of_its_own(
    gateway: Gateway, producer: Producer, partition: Partition, delivery: Delivery
) -> None:
    await ENDS["succeeded"](gateway, delivery, message_for(delivery))
    await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")
    consumer = await worker(gateway, partition, name="b")
    cleanup, again = await read_one(consumer), await read_one(consumer)
    assert (cleanup.task_id, again.task_id) == (cleanup_id("x", delivery), "x")
    assert cleanup_id("x", again) != cleanup_id("x", delivery)


# a cancel from outside


async def enqueue(producer: Producer, delay: float = 0.0) -> TaskHandle[Any]:
    message = EnvelopeTemplate("t", on_end=True).message(b"{}", task_id="x")
    return await producer.send_one(message, queue="default", delay=delay)


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_the_next_worker_cancels_a_task_that_has_a_clean_up_task(
    gateway: Gateway, producer: Producer, partition: Partition, delay: float
) -> None:
    consumer = await worker(gateway, partition)
    handle = await enqueue(producer, delay)
    for _ in range(2):
        assert await handle.cancel() is State.SCHEDULED
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await promote(gateway, partition, "x") == 1
    assert await handle.cancel() is State.SCHEDULED  # its message is on the stream: it is put off again
    assert await promote(gateway, partition, "x") == 1
    delivery = await read_one(consumer)
    assert delivery.has_history
    assert (await load_history(gateway, delivery, "x")).cancel
    assert await handle.cancel() is State.RUNNING


async def test_a_run_notes_that_its_task_has_a_clean_up_task(
    gateway: Gateway, producer: Producer, partition: Partition, delivery: Delivery
) -> None:
    """The envelope of an untyped producer does not say so."""
    await add_entries(gateway, delivery, "x", [Entry(Kind.SAVED, "#on_end", b"1")])
    await reschedule(gateway, delivery, "x", Counters(), delay=60.0, event="attempt_failed", data={})
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.SCHEDULED
    assert await promote(gateway, partition, "x") == 1


@pytest.mark.parametrize("event", ["attempt_failed", "returned"])
async def test_only_a_returned_task_waits_although_it_is_to_be_cancelled(
    gateway: Gateway, producer: Producer, partition: Partition, event: str
) -> None:
    """A worker that does not know the task returns it, so that one that knows its clean-up task ends it."""
    consumer = await worker(gateway, partition)
    handle = await enqueue(producer)
    await handle.cancel()
    await promote(gateway, partition, "x")
    delivery = await read_one(consumer)
    await reschedule(gateway, delivery, "x", Counters(), delay=60.0, event=event, data={})
    seconds, _ = await gateway.command("TIME")
    late = float(await gateway.command("ZSCORE", partition.due, "x")) / 1000 - int(seconds)
    assert (late > 30) is (event == "returned")
    await promote(gateway, partition, "x")
    assert (await load_history(gateway, await read_one(consumer), "x")).cancel


async def test_a_released_task_that_has_a_clean_up_task_is_put_off(
    gateway: Gateway, producer: Producer, partition: Partition
) -> None:
    consumer = await worker(gateway, partition)
    handle = await enqueue(producer)
    await SETTLING["release"](gateway, await read_one(consumer), "x")
    assert await handle.cancel() is State.SCHEDULED
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await claim_all(consumer) == []
    assert await promote(gateway, partition, "x") == 1
