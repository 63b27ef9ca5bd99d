"""Successors: the task that continues a handoff is stored once, in the partition of the present route."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, HandOffRefused, Namespace, Partition, Producer, State, set_partitions
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history
from perdure.queues.derived_tasks import Successor, confirm_successor, enqueue_successor
from perdure.queues.envelope import Envelope
from perdure.queues.event_log import read_log_tail
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import add_entries


def successor(task_id: str, source: str = "first token") -> Successor:
    return Successor(Envelope(id=task_id, task="t"), "default", b'{"n":1}', ("#received", b'{"v":1}'), source)


async def test_a_successor_is_stored_once_with_its_handoff(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    for _ in range(2):
        assert await enqueue_successor(gateway, namespace, successor("first.h1")) == partition
    assert await gateway.command("XLEN", partition.ready) == 1
    assert (await read_log_tail(gateway, partition, "first.h1")).saved == {"#received": b'{"v":1}'}
    delivery = await read_one(await worker(gateway, partition))
    assert delivery.has_history
    assert delivery.fields[b"args"] == b'{"n":1}'


async def test_a_successor_whose_large_arguments_are_incomplete_is_not_stored(
    gateway: Gateway, partition: Partition
) -> None:
    """The upload has expired, or a failover has lost a part of it: the caller uploads it again."""
    keys = [partition.ready, partition.closed, partition.record("first.h1"), partition.steps("first.h1")]
    upload = partition.upload("first.h1", "digest")
    await gateway.run(queue_script("upload_chunk"), [upload], [60_000, "args:0", b"one"])
    args: list[Argument] = [
        Envelope(id="first.h1", task="t").encode(),
        b'#{"chunks":2}',
        "first token",
        "d:#received",
        b"{}",
        "first.h1",
    ]
    keys += (partition.timeline, partition.inbox("first.h1"), upload)
    assert await gateway.run(queue_script("enqueue_successor"), keys, args) is None
    assert await gateway.command("EXISTS", partition.record("first.h1")) == 0
    assert await gateway.command("XLEN", partition.ready) == 0


async def test_an_id_of_another_task_is_refused_and_that_task_stays(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition
) -> None:
    handle = await producer.enqueue("other", {"a": 1}, task_id="first.h1", queue="default")
    for source in ("first token", "first another"):
        with pytest.raises(
            HandOffRefused, match=r"could not continue the task as first\.h1: this id belongs to another task"
        ):
            await enqueue_successor(gateway, namespace, successor("first.h1", source))
    assert (await handle.record()).task == "other"
    assert await gateway.command("EXISTS", partition.steps("first.h1")) == 0


async def test_a_successor_from_before_a_change_of_partitions_is_found(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    assert await enqueue_successor(gateway, namespace, successor("known")) == partition
    await set_partitions(gateway, namespace, "default", 2)
    assert await enqueue_successor(gateway, namespace, successor("known")) == partition
    found = await enqueue_successor(gateway, namespace, successor("new"))
    assert found.index > 0
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_log_tail_has_the_last_events_and_the_names_of_steps(
    gateway: Gateway, producer: Producer, partition: Partition
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    entries = [
        Entry(Kind.DONE, "list", b"{}\n1"),
        Entry(Kind.INTENT, "pay", b"{}"),
        Entry(Kind.SAVED, "#state", b"{}"),
        Entry(Kind.SAVED, "list#2", b"7"),
        *(Entry(Kind.EVENT, "decided", b"%d" % number, b'{"choice":"a"}') for number in range(1, 6)),
    ]
    await add_entries(gateway, delivery, "x", entries)
    trail = await read_log_tail(gateway, partition, "x", limit=3)
    assert [event.number for event in trail.events] == [3, 4, 5]
    assert (trail.number, set(trail.done), set(trail.intents)) == (5, {"list"}, {"pay"})
    assert trail.saved == {"#state": b"{}"}
    assert trail.now >= trail.events[-1].at
    assert trail.unread == 0


async def test_a_successor_that_was_read_is_confirmed_to_the_continued_task(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition
) -> None:
    await producer.enqueue("t", task_id="first", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    assert (await load_history(gateway, delivery, "first")).continued is None
    await enqueue_successor(gateway, namespace, successor("first.h1", "first token"))
    second = await read_one(await worker(gateway, partition))
    source = (await load_history(gateway, second, "first.h1")).handed_from
    assert source == "first token"
    for _ in range(2):
        await confirm_successor(gateway, namespace, source)
    assert (await load_history(gateway, delivery, "first")).continued == "first token"
    await confirm_successor(gateway, namespace, "gone token")
    assert not await gateway.command("EXISTS", partition.record("gone"))


async def test_a_cancelled_successor_is_confirmed_too(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition
) -> None:
    await producer.enqueue("t", task_id="first", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await enqueue_successor(gateway, namespace, successor("first.h1", "first token"))
    handle = await producer.find("first.h1")
    assert handle is not None
    assert await handle.cancel() is State.CANCELLED
    assert (await load_history(gateway, delivery, "first")).continued == "first token"
