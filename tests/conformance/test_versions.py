"""Tasks that wait for a newer version: parked in one act, and woken once by a worker that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import Entry, Kind, write_entries
from perdure.queues.delivery.due_set import wake_version
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, await_version, cancelled, succeed
from perdure.queues.inspection.views import resumable_tasks
from perdure.queues.keys import DATA_FORMAT
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script

from tests.support.consumers import promote, read_one, take_over, worker
from tests.support.delivery_calls import EVIDENCE
from tests.support.task_places import DUE, dump, places

NEXT = DATA_FORMAT + 1


async def score(gateway: Gateway, partition: Partition, task_id: str = "x") -> float:
    return float(await gateway.command("ZSCORE", partition.due, task_id))


async def now_ms(gateway: Gateway) -> int:
    seconds, micro = await gateway.command("TIME")
    return int(seconds) * 1000 + int(micro) // 1000


async def test_a_task_is_parked_with_the_version_that_it_needs(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    before = await now_ms(gateway)
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    stored = await dump(gateway, namespace)
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    assert await dump(gateway, namespace) == stored, "a lost reply changes nothing"
    assert await places(gateway, partition, "x") == [DUE]
    found = await (await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")).record()
    assert (found.state, found.waits, found.args) == (State.WAITING, f"version {NEXT}", b'{"n":1}')
    assert before + 600_000 <= await score(gateway, partition) <= await now_ms(gateway) + 600_000
    assert await gateway.command("ZRANGE", partition.versions, 0, -1, "WITHSCORES") == [b"x", str(NEXT).encode()]
    assert 0 < await gateway.command("PTTL", partition.versions) <= 600_000


async def test_the_wait_is_counted_from_the_first_time(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    await gateway.command("HINCRBY", partition.record("x"), "newer_since", -500_000)
    await promote(gateway, partition, "x")
    again = await read_one(await worker(gateway, partition))
    await await_version(gateway, again, "x", NEXT, limit=600)
    assert await score(gateway, partition) <= await now_ms(gateway) + 100_000


async def test_a_lost_delivery_is_not_parked(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await await_version(gateway, delivery, "x", NEXT, limit=600)
    assert await dump(gateway, namespace) == before


async def test_a_requested_cancel_makes_it_due_at_once(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    assert await (await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")).cancel() is State.RUNNING
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    assert await score(gateway, partition) <= await now_ms(gateway)


async def test_a_worker_wakes_the_tasks_that_it_can_read(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    await producer.enqueue("t", task_id="y", queue="default")
    await await_version(gateway, await read_one(await worker(gateway, partition)), "y", NEXT + 1, limit=600)
    assert await wake_version(gateway, partition) == 0
    monkeypatch.setattr("perdure.queues.delivery.due_set.DATA_FORMAT", NEXT)
    assert [await wake_version(gateway, partition) for _ in range(2)] == [1, 0]
    assert await score(gateway, partition) <= await now_ms(gateway) < await score(gateway, partition, "y")
    assert await gateway.command("ZRANGE", partition.versions, 0, -1) == [b"y"]


async def test_all_tasks_that_wait_are_woken(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.delivery.due_set._BATCH", 2)
    await await_version(gateway, delivery, "x", NEXT, limit=600)
    for task_id in ("a", "b", "c", "d"):
        await producer.enqueue("t", task_id=task_id, queue="default")
        await await_version(gateway, await read_one(await worker(gateway, partition)), task_id, NEXT, limit=600)
    monkeypatch.setattr("perdure.queues.delivery.due_set.DATA_FORMAT", NEXT)
    assert await wake_version(gateway, partition) == 5
    assert await gateway.command("EXISTS", partition.versions) == 0


async def test_a_task_waits_for_a_version_of_its_own_code(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await await_version(gateway, delivery, "x", 3, limit=600, task="report", counters=Counters(1, 2, 0))
    await producer.enqueue("t", task_id="y", queue="default")
    await await_version(gateway, await read_one(await worker(gateway, partition)), "y", NEXT, limit=600)
    found = await (await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")).record()
    assert (found.waits, found.attempts, found.crashes) == ("version 3 of report", 1, 2)
    key = partition.task_versions("report")
    assert await gateway.command("ZRANGE", key, 0, -1, "WITHSCORES") == [b"x", b"3"]
    assert 0 < await gateway.command("PTTL", key) <= 600_000
    for older in ({}, {"other": 3}, {"report": 2}):
        assert await wake_version(gateway, partition, older) == 0
    assert [await wake_version(gateway, partition, {"other": 1, "report": 4}) for _ in range(2)] == [1, 0]
    assert await score(gateway, partition) <= await now_ms(gateway) < await score(gateway, partition, "y")
    assert await gateway.command("EXISTS", key) == 0


async def test_tasks_that_may_resume_are_found_with_a_saved_value(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    """A queued task that has recorded nothing, and one that has ended, are not among them."""
    consumer = await worker(gateway, partition)
    for task_id in ("plain", "dead", "ended", "cancelled"):
        await producer.enqueue("t", task_id=task_id, queue="default")
        one = await read_one(consumer)
        await write_entries(gateway, one, task_id, [Entry(Kind.SAVED, "#version", b"2")], first=1)
        if task_id == "dead":
            await bury(gateway, one, "dead", task="t", reason=Reason.TIMEOUT, evidence=EVIDENCE, counters=Counters())
        elif task_id == "ended":
            await succeed(gateway, one, "ended", b"1", Counters(), ran=0.1, ttl=60.0)
        elif task_id == "cancelled":
            await cancelled(gateway, one, "cancelled", Counters(), ran=0.1, ttl=60.0)
    await write_entries(gateway, delivery, "x", [Entry(Kind.DONE, "one", b"{}\n1")], first=1)
    await producer.enqueue("t", task_id="new", queue="default")
    tasks = resumable_tasks(gateway, namespace, "#version")
    found = {record.id: (record.state, value) async for record, value in tasks}
    assert found == {
        "x": (State.RUNNING, None),
        "plain": (State.RUNNING, b"2"),
        "dead": (State.DEAD, b"2"),
    }


@pytest.mark.parametrize("task", [None, "t"])
async def test_a_cancelled_task_waits_for_no_version(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, task: str | None
) -> None:
    await await_version(gateway, delivery, "x", NEXT, limit=600, task=task)
    waiting = partition.versions if task is None else partition.task_versions(task)
    assert await gateway.command("ZCARD", waiting) == 1
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.CANCELLED
    assert await gateway.command("ZCARD", waiting) == 0


async def test_a_task_may_start_to_wait_for_a_version_after_its_canceller_has_read_it(
    gateway: Gateway,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, calls = Gateway.run, list[str]()

    async def late(self: Gateway, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        calls.append(script.name)
        if calls == ["cancel"]:
            await await_version(gateway, delivery, "x", NEXT, limit=600)
        return await run(self, script, keys, args)

    handle = await producer.find("x")
    assert handle is not None
    monkeypatch.setattr(Gateway, "run", late)
    assert await handle.cancel() is State.CANCELLED
    assert calls == ["cancel", "await_version", "cancel"]
    assert await gateway.command("ZCARD", partition.versions) == 0
