"""Import of a task with its past, and the end of an exported one: each in one act, and only if nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from perdure.deadletter import Reason, bury
from perdure.queues import (
    Delivery,
    Entry,
    Envelope,
    Gateway,
    Kind,
    Namespace,
    Partition,
    Producer,
    State,
    TaskExists,
    read_events,
)
from perdure.queues.delivery import close_exported, load_history, read_mark
from perdure.queues.delivery.settlement import Counters, park
from perdure.queues.derived_tasks import TaskPast, store_import
from perdure.queues.inbox import read_inbox, send_message

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import EVIDENCE, add_entries
from tests.support.task_places import places

PAST: Final = TaskPast(
    events=2,
    entries=4,
    format=None,
    fields={"d:a": b'{}\n"done"', "s:#state": b"{}", "c:#step:old": b"{}"},
    inbox={"m:7": b'5 {"id":"i","sender":"s","content":1}', "n:1": b"7 x", "id:x": b"7", "sent": b"1", "last": b"7"},
    log=[
        ("1-1", {"type": b"started", "n": b"1", "data": b'{"goal":"g"}', "e": b"1"}),
        ("1-2", {"type": b"step_completed", "step": b"a", "e": b"3"}),
        ("2-0", {"type": b"attempt_failed", "data": b'{"error":"E"}'}),
    ],
)


async def store(gateway: Gateway, namespace: Namespace, past: TaskPast = PAST, token: str = "import 1") -> Partition:
    envelope = Envelope(id="x", task="t").encode()
    return await store_import(
        gateway, namespace, "default", "x", envelope=envelope, arguments=b"{}", past=past, token=token
    )


async def test_an_imported_task_has_its_past(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    assert await store(gateway, namespace) == partition
    assert await store(gateway, namespace, replace(PAST, fields={})) == partition  # the reply of the first was lost
    with pytest.raises(TaskExists):
        await store(gateway, namespace, token="import 2")
    assert [(e.id, e.type, e.number, e.step, e.data) for e in await read_events(gateway, partition, "x")] == [
        ("1-1", "started", 1, None, {"goal": "g"}),
        ("1-2", "step_completed", None, "a", None),
        ("2-0", "attempt_failed", None, None, {"error": "E"}),
    ]
    assert [(m.number, m.content, m.at) async for m in read_inbox(gateway, partition, "x")] == [(7, 1, 5)]
    delivery = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, delivery, "x")
    assert (history.events, history.entries, history.saved) == (2, 4, {"#state": b"{}"})
    await add_entries(gateway, delivery, "x", [Entry(Kind.EVENT, "changed", b"3")])


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    found = await read_one(await worker(gateway, partition))
    await add_entries(gateway, found, "x", [Entry(Kind.EVENT, "started", b"1")])
    return found


async def close(gateway: Gateway, partition: Partition, mark: tuple[bytes, ...]) -> bool:
    return await close_exported(gateway, partition, "x", mark, event=b'{"digest":"d"}', retention=60)


async def test_a_parked_task_ends_if_it_is_as_it_was_read(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    assert not await close(gateway, partition, await read_mark(gateway, partition, "x"))  # a worker has it
    await park(gateway, delivery, "x", Counters(), delay=3600, waits="message", seen=0)
    mark = await read_mark(gateway, partition, "x")
    await send_message(gateway, partition, "x", "news")
    assert not await close(gateway, partition, mark)
    mark = await read_mark(gateway, partition, "x")
    assert await close(gateway, partition, mark)
    assert await places(gateway, partition, "x") == ["cancelled"]
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.status() is State.CANCELLED
    assert (await read_events(gateway, partition, "x"))[-1].type == "exported"
    for key in (partition.record("x"), partition.log("x"), partition.inbox("x")):
        assert 0 < await gateway.command("PTTL", key) <= 60_000
    assert not await close(gateway, partition, mark)


async def test_a_dead_letter_ends_as_a_cancelled_task(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await bury(
        gateway,
        delivery,
        "x",
        task="t",
        reason=Reason.NOT_RETRYABLE,
        evidence=EVIDENCE,
        counters=Counters(),
    )
    assert await close(gateway, partition, await read_mark(gateway, partition, "x"))
    assert await gateway.command("XLEN", partition.dead) == 0
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.task, record.reason) == (State.CANCELLED, "t", None)
