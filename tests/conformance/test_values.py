"""Named values of a task, as the scripts keep them: the later change counts, once, in the life of the task."""

from __future__ import annotations

import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State, TaskEnded, TaskNotFound
from perdure.queues.delivery.checkpoint import Entry, Kind, write_entries
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.derived_tasks import Successor, enqueue_successor
from perdure.queues.envelope import Envelope
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import queue_script
from perdure.queues.values import (
    MAX_VALUES,
    NamedValue,
    encode_value,
    forward_values,
    read_changes,
    read_task_values,
    read_value,
    update_value,
)

from tests.support.consumers import read_one, take_over, worker
from tests.support.delivery_calls import SETTLING, add_entries, last_entry

pytestmark = pytest.mark.integration


def entry(name: str, value: object) -> Entry:
    return Entry(Kind.VALUE, name, encode_value(name, value, "handler"))


async def values(gateway: Gateway, partition: Partition, task: str = "t") -> dict[str, object]:
    return {value.name: value.value for value in await read_task_values(gateway, partition, task)}


async def send_again(gateway: Gateway, partition: Partition, update_id: str, value: int) -> list[bytes]:
    """Send the bytes of an update, as a call that was repeated or comes late does."""
    keys = [partition.record("t"), partition.inbox("t")]
    args: list[Argument] = ["speed", encode_value("speed", value, ""), update_id, MAX_VALUES, ""]
    found: list[bytes] = await gateway.run(queue_script("update_value"), keys, args)
    return found


async def test_the_later_of_two_changes_counts(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    first = await update_value(gateway, partition, "t", "speed", 1, by="ada")
    await add_entries(gateway, delivery, "t", [entry("speed", 2), entry("speed", 3), entry("status", "runs")])
    assert await values(gateway, partition) == {"speed": 3, "status": "runs"}
    second = await update_value(gateway, partition, "t", "speed", 4, by="ada")
    assert second.number > first.number
    last, found = await read_changes(gateway, partition, "t", after=first.number)
    assert last == second.number
    assert [(value.name, value.by) for value in found] == [("status", "handler"), ("speed", "ada")]
    assert await read_changes(gateway, partition, "t", after=last) == (last, [])
    assert (await read_value(gateway, partition, "t", "none")) is None
    assert (await handle.pending_messages()) == []


async def test_an_update_whose_bytes_come_again_replaces_no_later_value(
    producer: Producer, partition: Partition
) -> None:
    gateway = producer.gateway
    await producer.enqueue("t", task_id="t", queue="default")
    assert (await send_again(gateway, partition, "a" * 24, 1))[0] == b"set"
    later = await update_value(gateway, partition, "t", "speed", 2)
    assert await send_again(gateway, partition, "a" * 24, 1) == [b"set", b"%d" % later.number, b"queued"]
    assert await values(gateway, partition) == {"speed": 2}
    for number in range(40):
        await update_value(gateway, partition, "t", "other", number)
    known = await gateway.command("HGET", partition.inbox("t"), "updates")
    assert len(known.split(b",")) == 32


async def test_entries_of_a_run_that_come_again_replace_no_later_value(
    producer: Producer, partition: Partition
) -> None:
    gateway = producer.gateway
    await producer.enqueue("t", task_id="t", queue="default")
    late = await read_one(await worker(gateway, partition))
    first = await last_entry(gateway, late, "t") + 1
    await add_entries(gateway, late, "t", [entry("speed", 1)])
    await update_value(gateway, partition, "t", "speed", 2)
    await write_entries(gateway, late, "t", [entry("speed", 1)], first=first)
    assert await values(gateway, partition) == {"speed": 2}
    await take_over(gateway, late)
    with pytest.raises(LeaseLost):
        await write_entries(gateway, late, "t", [entry("speed", 3)], first=first + 1)
    assert await values(gateway, partition) == {"speed": 2}


async def test_a_value_that_a_run_writes_late_replaces_no_later_one(producer: Producer, partition: Partition) -> None:
    gateway, inbox = producer.gateway, partition.inbox("t")
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    update = await update_value(gateway, partition, "t", "speed", 1)
    await add_entries(gateway, delivery, "t", [entry("speed", 2)._replace(log=b"60000")])
    assert await values(gateway, partition) == {"speed": 1}
    assert await gateway.command("HGET", inbox, "o:speed") == b"%d" % update.number
    await add_entries(gateway, delivery, "t", [entry("other", 2)._replace(log=b"60000")])
    await add_entries(gateway, delivery, "t", [entry("other", 3)._replace(log=b"60000")])
    assert await values(gateway, partition) == {"speed": 1, "other": 3}, "a run's own earlier write is replaced"
    await gateway.command("HSET", inbox, "o:speed", update.number + 10**9)
    await add_entries(gateway, delivery, "t", [entry("speed", 4)._replace(log=b"60000")])
    assert await values(gateway, partition) == {"speed": 4, "other": 3}, "the clock was set back"


async def test_an_ended_task_keeps_its_values_and_takes_no_more(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await update_value(gateway, partition, "t", "speed", 1)
    await succeed(gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60)
    with pytest.raises(TaskEnded, match="task t takes no more values: it is succeeded"):
        await update_value(gateway, partition, "t", "speed", 2)
    assert await values(gateway, partition) == {"speed": 1}
    assert 0 < await gateway.command("PTTL", partition.inbox("t")) <= 60_000
    with pytest.raises(TaskNotFound):
        await update_value(gateway, partition, "missing", "speed", 1)
    with pytest.raises(TaskNotFound):
        await read_task_values(gateway, partition, "missing")


async def test_a_dead_letter_takes_values_for_its_replay(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await SETTLING["bury"](gateway, delivery, "t")
    assert (await update_value(gateway, partition, "t", "speed", 1)).state is State.DEAD
    assert await gateway.command("PTTL", partition.inbox("t")) > 0
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay(fresh=True))
    assert await gateway.command("PTTL", partition.inbox("t")) == -1
    assert await values(gateway, partition) == {"speed": 1}


async def test_a_successor_begins_with_the_values_and_gets_those_that_were_changed_since(
    gateway: Gateway, producer: Producer, namespace: Namespace, partition: Partition
) -> None:
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await update_value(gateway, partition, "t", "speed", 1, by="ada")
    _, before = await read_changes(gateway, partition, "t")
    await update_value(gateway, partition, "t", "speed", 2, by="bob")
    await update_value(gateway, partition, "t", "more", True)
    following = Successor(Envelope(id="t.h1", task="t"), "default", b"{}", ("#received", b"{}"), "t token", before)
    for _ in range(2):
        assert await enqueue_successor(gateway, namespace, following) == partition
    assert await values(gateway, partition, "t.h1") == {"speed": 1}
    for _ in range(2):
        await forward_values(gateway, partition, "t", partition, "t.h1")
    assert await values(gateway, partition, "t.h1") == {"speed": 2, "more": True}

    await add_entries(gateway, delivery, "t", [Entry(Kind.TRANSFERRED, "t.h1", b"t.h1")])
    receipt = await update_value(gateway, partition, "t", "speed", 3)
    assert receipt.task_id == "t.h1"
    await forward_values(gateway, partition, "t", partition, "t.h1")
    found = await read_task_values(gateway, partition, "t")
    assert [(value.name, value.value, value.by) for value in found] == [("more", True, ""), ("speed", 3, "")]


async def test_numbers_grow_although_the_clock_goes_back(producer: Producer, partition: Partition) -> None:
    gateway, ahead = producer.gateway, 9_000_000_000_000
    await producer.enqueue("t", task_id="t", queue="default")
    await update_value(gateway, partition, "t", "speed", 1)
    await gateway.command("HSET", partition.inbox("t"), "changed", ahead)
    assert (await update_value(gateway, partition, "t", "speed", 2)).number == ahead + 1


async def test_what_another_program_wrote_is_a_problem_and_hides_no_value(
    producer: Producer, partition: Partition
) -> None:
    gateway, key = producer.gateway, partition.inbox("t")
    await producer.enqueue("t", task_id="t", queue="default")
    await update_value(gateway, partition, "t", "speed", 1)
    await gateway.command("HSET", key, "values", b"speed \xff large broken none", "v:large", "5 " + "x" * 100_000)
    await gateway.command("HSET", key, "v:broken", "7 {}", "v:\xff", "1 2")
    found = await read_task_values(gateway, partition, "t")
    assert [(value.name, value.value, value.problem is None) for value in found] == [
        ("large", None, False),
        ("broken", None, False),
        ("speed", 1, True),
    ]
    await gateway.command("HSET", key, "values", "x " * 6000, "changed", "x" * 100)
    assert await read_task_values(gateway, partition, "t") == []
    assert (await update_value(gateway, partition, "t", "speed", 2)).number > 0
    assert isinstance(await read_value(gateway, partition, "t", "speed"), NamedValue)
