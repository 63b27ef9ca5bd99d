"""Inspection of queues, tasks and workers: the answers agree with Redis, and reading changes nothing."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from perdure.queues import (
    Gateway,
    Namespace,
    Partition,
    Producer,
    State,
    WorkerInfo,
    list_queues,
    list_tasks,
    list_workers,
)
from perdure.queues.inspection.running import running_tasks
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.presence import announce, withdraw

from tests.support.consumers import claim_one, promote, read, read_one, take_over, worker
from tests.support.delivery_calls import SETTLING
from tests.support.task_places import dump

INFO = WorkerInfo(
    id="a", app="audit", host="h", pid=7, version="0.1", queues=("mail", "video"), concurrency=8, in_flight=3, started=0
)


async def every_state(gateway: Gateway, partition: Partition, producer: Producer) -> dict[str, State]:
    """Create one task in each state; return them by id."""
    a = await worker(gateway, partition)
    for act in ("succeed", "cancelled", "bury", "reschedule"):
        await producer.enqueue("t", {"n": 1}, task_id=act, queue="default")
        await SETTLING[act](gateway, await read_one(a), act)
    await producer.enqueue("t", task_id="released", queue="default")
    await SETTLING["release"](gateway, await read_one(a), "released")
    await producer.enqueue("t", task_id="running", queue="default")
    await read_one(a)
    await producer.enqueue("t", task_id="delayed", delay=60, queue="default")
    await producer.enqueue("t", task_id="queued", queue="default")
    return {
        "succeed": State.SUCCEEDED,
        "cancelled": State.CANCELLED,
        "bury": State.DEAD,
        "reschedule": State.SCHEDULED,
        "released": State.QUEUED,
        "running": State.RUNNING,
        "delayed": State.SCHEDULED,
        "queued": State.QUEUED,
    }


async def test_the_numbers_of_a_queue(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await every_state(gateway, partition, producer)
    (stats,) = await list_queues(gateway, namespace)
    assert (stats.queue, stats.depth, stats.in_flight, stats.due, stats.dead) == ("default", 2, 1, 2, 1)
    assert stats.consumers == {"a": 1}
    assert stats.oldest_age is not None
    assert 0 <= stats.oldest_age < 60
    assert orjson.loads(orjson.dumps(stats.summary()))["depth"] == 2


async def test_the_numbers_of_a_queue_without_a_group(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 3, queue="mail")
    await producer.enqueue("t", queue="audit", delay=60)
    audit, mail = await list_queues(gateway, namespace)
    assert (audit.queue, audit.depth, audit.due, audit.oldest_age) == ("audit", 0, 1, None)
    assert (mail.queue, mail.depth, mail.in_flight, mail.consumers) == ("mail", 3, 0, {})
    assert mail.oldest_age is not None


async def test_the_numbers_of_an_empty_queue(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    await worker(gateway, partition)
    (stats,) = await list_queues(gateway, namespace)
    assert (stats.depth, stats.in_flight, stats.due, stats.dead, stats.oldest_age) == (0, 0, 0, 0, None)


async def test_the_numbers_of_an_unknown_queue(gateway: Gateway, namespace: Namespace) -> None:
    assert await list_queues(gateway, namespace) == []
    assert await queue_partitions(gateway, namespace) == []
    assert [one async for one in list_tasks(gateway, namespace)] == []
    assert await list_workers(gateway, namespace) == []


async def test_the_age_is_that_of_the_oldest_waiting_message(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """A running message does not count; a released one waits again, since it was sent."""
    now = int((await gateway.command("TIME"))[0]) * 1000
    for minutes, name in ((60, "old"), (30, "middle"), (10, "young")):
        entry = await gateway.command("XADD", partition.ready, f"{now - minutes * 60_000}-0", "env", b"", "args", b"")
        await gateway.command("HSET", partition.record(name), "state", "queued", "entry", entry)
    a = await worker(gateway, partition)

    async def minutes_waited() -> float:
        (stats,) = await list_queues(gateway, namespace)
        assert stats.oldest_age is not None
        return round(stats.oldest_age / 60)

    assert await minutes_waited() == 60
    oldest = await read_one(a)
    assert await minutes_waited() == 30
    await read_one(a)
    assert await minutes_waited() == 10
    await SETTLING["release"](gateway, oldest, "old")
    assert await minutes_waited() == 60


async def test_every_state_is_reported(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    expected = await every_state(gateway, partition, producer)
    found = {record.id: record.state async for record in list_tasks(gateway, namespace)}
    assert found == expected
    for task_id, state in expected.items():
        handle = await producer.find(task_id)
        assert handle is not None
        assert await handle.status() is state


async def test_every_record_has_its_payload(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await every_state(gateway, partition, producer)
    async for record in list_tasks(gateway, namespace):
        assert record.task == "t", record.id
        assert record.args is not None
        assert record.enqueued_at is not None
        assert orjson.loads(orjson.dumps(record.summary()))["id"] == record.id


async def test_a_running_task_names_its_worker(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    assert (await handle.record()).worker is None
    delivery = await read_one(await worker(gateway, partition))
    assert (await handle.record()).worker == "a"
    second = await take_over(gateway, delivery, "b")
    assert (await handle.record()).worker == "b"
    await SETTLING["release"](gateway, second, "x")
    assert (await handle.record()).worker is None
    third = await claim_one(await worker(gateway, partition, name="c"))
    await SETTLING["succeed"](gateway, third, "x")
    assert (await handle.record()).worker == "c"


async def test_tasks_are_filtered_by_state_name_and_queue(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await every_state(gateway, partition, producer)
    await producer.enqueue("mail", task_id="m", queue="other")

    async def found(*states: State, task: str | None = None, queue: str | None = None) -> set[str]:
        listed = list_tasks(gateway, namespace, queue=queue, states=states, task=task)
        return {record.id async for record in listed}

    assert await found(State.SCHEDULED) == {"reschedule", "delayed"}
    assert await found(State.DEAD, State.RUNNING) == {"bury", "running"}
    assert await found(task="mail") == {"m"}
    assert await found(queue="other") == {"m"}
    assert await found(State.QUEUED, task="t") == {"released", "queued"}
    assert await found(queue="nowhere") == set()


async def test_tasks_are_listed_before_the_first_worker(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 700, queue="default")
    found = {record.id: record.state async for record in list_tasks(gateway, namespace)}
    assert found == {handle.id: State.QUEUED for handle in handles}


async def test_keys_of_steps_and_logs_are_not_listed_as_tasks(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await every_state(gateway, partition, producer)
    await promote(gateway, partition, "reschedule")
    delivery = (await read(await worker(gateway, partition), 5))[-1]
    await SETTLING["give_back"](gateway, delivery, "")
    assert len([one async for one in list_tasks(gateway, namespace)]) == 8


async def test_inspection_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await every_state(gateway, partition, producer)
    before = await dump(gateway, namespace)
    await list_queues(gateway, namespace)
    assert len([one async for one in list_tasks(gateway, namespace)]) == 8
    assert await dump(gateway, namespace) == before


async def test_the_numbers_of_partitions_are_added_up(gateway: Gateway, namespace: Namespace) -> None:
    await gateway.command("HSET", namespace.queues, "wide", 3)
    assert [one.index for one in await queue_partitions(gateway, namespace, "wide")] == [0, 1, 2]
    assert await queue_partitions(gateway, namespace, "narrow") == []
    for index in range(3):
        partition = namespace.partition("wide", index)
        a = await worker(gateway, partition, name=f"w{index % 2}")
        for _ in range(2):
            await gateway.command("XADD", partition.ready, "*", "env", "{}")
        await read_one(a)
    (stats,) = await list_queues(gateway, namespace)
    assert (stats.depth, stats.in_flight, stats.consumers) == (3, 3, {"w0": 2, "w1": 1})


async def test_live_workers_are_counted_whether_or_not_they_have_read(gateway: Gateway, namespace: Namespace) -> None:
    """A killed worker stays in the consumer group; an idle worker is in no group yet."""
    queue = namespace.partition("mail")
    await gateway.command("HSET", namespace.queues, "mail", 1)
    await gateway.command("XADD", queue.ready, "*", "env", "{}")
    await read_one(await worker(gateway, queue, name="killed"))
    await announce(gateway, namespace, replace(INFO, id="killed"), ttl=30.0)
    long_ago = 1_000_000
    await gateway.command("HSET", namespace.worker("killed"), "seen", long_ago)
    for name in ("idle", "idle-too"):
        await announce(gateway, namespace, replace(INFO, id=name), ttl=30.0)
    await announce(gateway, namespace, replace(INFO, id="elsewhere", queues=("video",)), ttl=30.0)
    (stats,) = await list_queues(gateway, namespace)
    assert list(stats.consumers) == ["killed"]
    assert stats.workers == 2


# workers


async def test_a_worker_is_listed_while_it_announces_itself(gateway: Gateway, namespace: Namespace) -> None:
    started = (await announce(gateway, namespace, INFO, ttl=30.0)).started
    (found,) = await list_workers(gateway, namespace)
    assert replace(found, seen=0.0) == replace(INFO, started=started, draining=False)
    assert 0 <= found.seen < 10
    assert 20_000 < await gateway.command("PTTL", namespace.worker("a")) <= 30_000
    assert orjson.loads(orjson.dumps(found.summary()))["queues"] == ["mail", "video"]
    again = await announce(gateway, namespace, replace(INFO, started=started), ttl=30.0)
    assert again.started == started
    await withdraw(gateway, namespace, "a")
    assert await list_workers(gateway, namespace) == []


async def test_workers_are_listed_by_age(gateway: Gateway, namespace: Namespace) -> None:
    for started, name in ((300, "c"), (100, "a"), (200, "b")):
        await announce(gateway, namespace, replace(INFO, id=name, started=started), ttl=30.0)
    assert [one.id for one in await list_workers(gateway, namespace)] == ["a", "b", "c"]


async def test_a_silent_worker_is_not_listed(gateway: Gateway, namespace: Namespace) -> None:
    await announce(gateway, namespace, INFO, ttl=30.0)
    await gateway.command("PEXPIRE", namespace.worker("a"), 0)
    assert await list_workers(gateway, namespace) == []
    await gateway.command("ZADD", namespace.workers, 1, "a")
    await announce(gateway, namespace, replace(INFO, id="b"), ttl=30.0)
    assert await gateway.command("ZRANGE", namespace.workers, 0, -1) == [b"b"]


@pytest.mark.parametrize("count", [0, 1])
async def test_withdrawing_twice_raises_nothing(gateway: Gateway, namespace: Namespace, count: int) -> None:
    for _ in range(count):
        await announce(gateway, namespace, INFO, ttl=30.0)
    await withdraw(gateway, namespace, "a")
    await withdraw(gateway, namespace, "a")
    assert list(await dump(gateway, namespace)) == [namespace.worker("a").encode()]


# running tasks


async def test_running_tasks_are_those_that_a_worker_holds(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    partitions = [partition, namespace.partition("other")]
    assert await running_tasks(gateway, partitions, 10) == []
    await every_state(gateway, partition, producer)
    await gateway.command("XADD", partition.ready, "*", "env", "no envelope")
    await read(await worker(gateway, partition, name="b"))
    found = await running_tasks(gateway, partitions, 10)
    assert {(record.id, record.worker) for record in found} == {("running", "a"), ("queued", "b")}
    assert len(await running_tasks(gateway, partitions, 1)) == 1
