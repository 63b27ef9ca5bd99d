"""A repeated id: silent for the same task and arguments, an error for others, whatever the state of the stored task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from perdure.deadletter.burial import Evidence, bury
from perdure.deadletter.letters import find_letter
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Encryptor, Gateway, Namespace, Partition, Producer, TaskExists, TaskHandle, set_partitions
from perdure.queues.delivery.settlement import Counters, reschedule, succeed
from perdure.queues.envelope import EnvelopeTemplate

from tests.support.consumers import read_one, worker
from tests.support.task_places import dump

Fate = Callable[[Gateway, Partition, TaskHandle[Any]], Coroutine[Any, Any, None]]


async def stays(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    """Leave the task in its queue."""


async def runs(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    await read_one(await worker(gateway, partition))


async def succeeds(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    delivery = await read_one(await worker(gateway, partition))
    await succeed(gateway, delivery, handle.id, b"42", Counters(1), ran=0.1, ttl=60)


async def fails(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    delivery = await read_one(await worker(gateway, partition))
    await reschedule(gateway, delivery, handle.id, Counters(1), delay=60, event="failed", data={})


async def dies(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    delivery = await read_one(await worker(gateway, partition))
    evidence = Evidence.of(ValueError("broken"))
    await bury(
        gateway, delivery, handle.id, task="t", reason=Reason.NOT_RETRYABLE, evidence=evidence, counters=Counters(1)
    )


async def is_cancelled(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> None:
    await handle.cancel()


FATES = (stays, runs, succeeds, fails, dies, is_cancelled)


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
async def test_another_name_or_other_arguments_are_reported(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, fate: Fate
) -> None:
    handle = await producer.enqueue("t", {"n": 1, "secret": "hunter2"}, task_id="order-7", queue="default")
    await fate(gateway, partition, handle)
    before = await dump(gateway, namespace)
    for delay in (0.0, 60.0):
        again = await producer.enqueue(
            "t", {"secret": "hunter2", "n": 1}, task_id="order-7", queue="default", delay=delay
        )
        assert again.id == "order-7"
        with pytest.raises(TaskExists) as other:
            await producer.enqueue(
                "t", {"n": 2, "secret": "hunter3", "m": 1}, task_id="order-7", queue="default", delay=delay
            )
        assert str(other.value) == (
            "task order-7 exists already with other arguments (n, secret, m); nothing was stored: call again with the "
            "same task and arguments, or choose another id"
        )
        with pytest.raises(TaskExists, match=r"task order-7 exists already as a task 't', not 'u'; nothing was stored"):
            await producer.enqueue("u", {"n": 1, "secret": "hunter2"}, task_id="order-7", queue="default", delay=delay)
    assert await dump(gateway, namespace) == before


async def test_a_delayed_task_is_compared_too(producer: Producer) -> None:
    await producer.enqueue("t", {"n": 1}, task_id="later", queue="default", delay=60)
    await producer.enqueue("t", {"n": 1}, task_id="later", queue="default", delay=60)
    with pytest.raises(TaskExists):
        await producer.enqueue("t", {"n": 2}, task_id="later", queue="default", delay=60)


async def test_a_task_in_a_closed_partition_is_compared_too(gateway: Gateway, namespace: Namespace) -> None:
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
        await set_partitions(gateway, namespace, "default", 4)
        await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
        with pytest.raises(TaskExists):
            await producer.enqueue("t", {"n": 2}, task_id="x", queue="default")
        messages = [EnvelopeTemplate("t").message(b'{"n":%d}' % n, task_id=name) for n, name in ((3, "x"), (4, "y"))]
        with pytest.raises(TaskExists):
            await producer.send(messages, queue="default")
        assert await producer.find("y") is not None


async def test_of_a_batch_the_other_tasks_are_stored(producer: Producer) -> None:
    form = EnvelopeTemplate("t")
    await producer.send([form.message(b'{"n":%d}' % n, task_id=f"known-{n}") for n in range(3)], queue="default")

    async def many() -> AsyncIterator[Any]:
        for n in range(4):
            yield form.message(b'{"n":%d}' % (n or 7), task_id=f"known-{n}")
            yield form.message(b'{"n":7}', task_id=f"new-{n}")
        yield form.message(b'{"n":7}', task_id="known-2")

    stored: list[str] = []
    handles: AsyncIterator[TaskHandle[Any]] = producer.send_stream(many(), queue="default")
    with pytest.raises(TaskExists) as conflict:
        async for handle in handles:
            stored += [handle.id]
    assert conflict.value.task_ids == ("known-0", "known-2")
    assert "and 1 more of these tasks have such a conflict (known-2)" in str(conflict.value)
    assert stored == ["new-0", "known-1", "new-1", "new-2", "known-3", "new-3"]


async def test_one_of_many_at_once_is_stored(producer: Producer) -> None:
    calls = [producer.enqueue("t", {"n": n}, task_id="x", queue="default") for n in range(20)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, TaskExists) for answer in answers) == 19


async def test_arguments_that_a_replay_replaced_are_not_compared(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    await dies(gateway, partition, handle)
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await replay(gateway, letter, Replay(args=b'{"n":2}'))
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    with pytest.raises(TaskExists):
        await producer.enqueue("u", {"n": 1}, task_id="x", queue="default")


async def test_encrypted_arguments_are_compared_by_those_who_have_the_key(
    gateway: Gateway, namespace: Namespace, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Encryptor([bytes(32)]), Encryptor([bytes([1]) * 32, bytes(32)])
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        monkeypatch.setattr(gateway, "encryptor", first)
        await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
        for encryptor in (first, second):
            monkeypatch.setattr(gateway, "encryptor", encryptor)
            await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
            with pytest.raises(TaskExists):
                await producer.enqueue("t", {"n": 2}, task_id="x", queue="default")
        monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes([2]) * 32]))
        await producer.enqueue("t", {"n": 2}, task_id="x", queue="default")
