"""Lost replies to an enqueue, at each point of it: every task is stored once, however often the caller repeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from perdure import Producer, State, TaskHandle, Unavailable
from perdure.queues import Gateway, Namespace, set_partitions
from perdure.queues.enqueueing import BatchEnqueuer, BatchLimits
from perdure.queues.envelope import EnvelopeTemplate, TaskMessage

from tests.support.consumers import needs_one_server
from tests.support.lossy_proxy import LossyProxy, lossy_gateway

MANY = 50
"""Three scripts for one partition, one or two for each of four."""


@pytest.fixture(autouse=True)
def small_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small batches, so that a few tasks need several scripts."""
    monkeypatch.setattr(BatchEnqueuer, "limits", BatchLimits(script=20, together=5))


@pytest.fixture
async def lossy(gateway: Gateway, namespace_name: str) -> AsyncIterator[tuple[Producer, LossyProxy]]:
    """A producer whose replies may be lost."""
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with lossy_gateway(gateway) as (lossy, line), Producer(namespace=namespace_name, gateway=lossy) as producer:
        yield producer, line


def messages(ids: bool) -> list[TaskMessage]:
    """Tasks, with ids of the caller's own or without."""
    form = EnvelopeTemplate("t")
    return [form.message(b'{"n":%d}' % n, task_id=f"mine-{n}" if ids else None) for n in range(MANY)]


async def stored(gateway: Gateway, namespace: Namespace, indexes: range) -> list[str]:
    """Return the arguments of each task in the streams and due sets of these partitions."""
    found: list[bytes] = []
    for where in (namespace.partition("default", index) for index in indexes):
        ready = await gateway.command("XRANGE", where.ready, "-", "+")
        due = await gateway.command("ZRANGE", where.due, 0, -1)
        found += [fields[fields.index(b"args") + 1] for _, fields in ready]
        found += [await gateway.command("HGET", where.record(task_id.decode()), "args") for task_id in due]
    return sorted(one.decode() for one in found)


ALL = sorted(f'{{"n":{n}}}' for n in range(MANY))


@pytest.mark.parametrize("position", [0, 30, MANY - 1])
@pytest.mark.parametrize(("partitions", "delay"), [(1, 0.0), (4, 60.0)])
async def test_of_many_the_producer_itself_asks_again(
    gateway: Gateway,
    namespace: Namespace,
    lossy: tuple[Producer, LossyProxy],
    position: int,
    partitions: int,
    delay: float,
) -> None:
    producer, line = lossy
    await set_partitions(gateway, namespace, "default", partitions)
    line.lose(b'{"n":%d}' % position)
    many = ({"n": n} for n in range(MANY))
    handles = await producer.enqueue_many("t", many, delay=delay, queue="default")
    assert line.lost == 1
    assert len({handle.id for handle in handles}) == MANY
    assert await stored(gateway, namespace, range(partitions)) == ALL


@pytest.mark.parametrize("position", [0, 30, MANY - 1])
@pytest.mark.parametrize(("partitions", "delay"), [(1, 60.0), (4, 0.0)])
async def test_where_it_gave_up_the_caller_asks_again_under_the_same_ids(
    gateway: Gateway,
    namespace: Namespace,
    lossy: tuple[Producer, LossyProxy],
    position: int,
    partitions: int,
    delay: float,
) -> None:
    """On another connection, as after a restart of the whole program."""
    producer, line = lossy
    producer.gateway.patience = 0.0
    await set_partitions(gateway, namespace, "default", partitions)
    line.lose(b'{"n":%d}' % position)
    with pytest.raises(Unavailable):
        await producer.send(messages(ids=True), queue="default", delay=delay)
    assert line.lost == 1
    async with Producer(namespace=namespace.name, gateway=gateway) as another:
        again: list[TaskHandle[object]] = await another.send(messages(ids=True), queue="default", delay=delay)
    assert [handle.id for handle in again] == [f"mine-{n}" for n in range(MANY)]
    assert await stored(gateway, namespace, range(partitions)) == ALL


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_so_does_one_who_enqueues_a_single_task(
    gateway: Gateway, namespace: Namespace, lossy: tuple[Producer, LossyProxy], delay: float
) -> None:
    """Also where the queue was spread in between, and where the first one has been run."""
    producer, line = lossy
    await producer.enqueue("t", queue="warm")
    producer.gateway.patience = 0.0
    line.lose(b'"id":"mine"')
    with pytest.raises(Unavailable):
        await producer.enqueue("t", {"n": 1}, task_id="mine", delay=delay, queue="default")
    assert line.lost == 1
    async with Producer(namespace=namespace.name, gateway=gateway) as another:
        for _ in range(2):
            handle = await another.enqueue("t", {"n": 1}, task_id="mine", delay=delay, queue="default")
            assert handle.partition.index == 0
            assert await handle.status() is (State.SCHEDULED if delay else State.QUEUED)
            await set_partitions(gateway, namespace, "default", 4)
    assert await stored(gateway, namespace, range(1)) == ['{"n":1}']
    assert await stored(gateway, namespace, range(1, 5)) == []


async def test_of_many_callers_at_once_each_stores_one(
    gateway: Gateway, namespace: Namespace, lossy: tuple[Producer, LossyProxy]
) -> None:
    """All of them were under way on the connection that broke."""
    producer, line = lossy
    await producer.enqueue("t", queue="warm")
    line.lose(b'{"n":13}')
    await asyncio.gather(*(producer.enqueue("t", {"n": n}, queue="default") for n in range(40)))
    assert line.lost == 1
    assert await stored(gateway, namespace, range(1)) == sorted(f'{{"n":{n}}}' for n in range(40))
