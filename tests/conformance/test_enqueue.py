"""Enqueuing: stored once, or refused and not stored at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition, PayloadTooLarge, Producer, State, TaskHandle, TaskNotFound
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.envelope import Envelope, EnvelopeTemplate, Options, TaskMessage
from perdure.queues.keys import KEY_FORMAT
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import ids, needs_one_server, needs_server, promote, read, read_one, take_over, worker
from tests.support.lossy_proxy import lossy_gateway
from tests.support.servers.every_node import on_every_node
from tests.support.task_places import DUE, PENDING, READY, dump, places


def message(task_id: str, arguments: bytes = b"{}") -> TaskMessage:
    return EnvelopeTemplate("t").message(arguments, task_id=task_id)


async def script_calls(gateway: Gateway) -> int:
    """How many scripts the server has carried out, by EVALSHA or EVAL."""
    counted: list[str] = []
    for stats in await on_every_node(gateway, "INFO", "commandstats"):
        lines = dict(line.split(":", 1) for line in stats.decode().splitlines() if ":" in line)
        counted += [lines.get(f"cmdstat_{name}", "calls=0") for name in ("evalsha", "eval")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in counted)


async def test_a_task_is_one_message_and_one_record(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handle = await producer.enqueue(
        "audit", {"root": "src"}, headers={"trace": "1"}, timeout=9.5, max_attempts=2, queue="default"
    )
    record = await handle.record()
    assert await places(gateway, partition, handle.id) == [READY]
    assert (record.state, record.task, record.args) == (State.QUEUED, "audit", b'{"root":"src"}')
    assert record.headers == {"trace": "1"}
    assert (record.attempts, record.crashes, record.replays, record.worker) == (0, 0, 0, None)
    delivery = await read_one(await worker(gateway, partition))
    assert Envelope.decode(delivery.fields[b"env"]).options == Options(timeout=9.5, max_attempts=2)
    assert not delivery.has_history


async def test_its_time_is_that_of_redis(gateway: Gateway, producer: Producer) -> None:
    before = await gateway.command("TIME")
    record = await (await producer.enqueue("t", queue="default")).record()
    after = await gateway.command("TIME")
    assert record.enqueued_at is not None
    assert int(before[0]) * 1000 <= record.enqueued_at <= (int(after[0]) + 1) * 1000


async def test_an_id_of_ones_own_is_stored_once(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await producer.enqueue("t", {"n": 1}, task_id="order-7", queue="default")
    before = await dump(gateway, namespace)
    again = await producer.enqueue("t", {"n": 1}, task_id="order-7", queue="default")
    assert await dump(gateway, namespace) == before
    assert (await again.record()).args == b'{"n":1}'


async def test_an_id_is_stored_once_by_many_at_once(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await asyncio.gather(*(producer.enqueue("t", {"n": 1}, task_id="order-7", queue="default") for _ in range(40)))
    assert await places(gateway, partition, "order-7") == [READY]


async def test_an_id_is_stored_once_within_one_call(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    messages = [message("x", b'{"n":1}'), message("y"), message("x", b'{"n":1}')]
    handles: list[TaskHandle[Any]] = await producer.send(messages, queue="default")
    assert [handle.id for handle in handles] == ["x", "y", "x"]
    assert await places(gateway, partition, "x") == [READY]
    assert (await handles[2].record()).args == b'{"n":1}'


async def test_a_task_that_is_being_run_is_not_stored_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await read_one(await worker(gateway, partition))
    before = await dump(gateway, namespace)
    await producer.enqueue("t", task_id="x", queue="default")
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    assert await places(gateway, partition, "x") == [PENDING]
    assert await dump(gateway, namespace) == before


async def test_a_task_that_has_its_result_is_not_stored_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await succeed(gateway, delivery, "x", b"42", Counters(1), ran=0.1, ttl=60)
    before = await dump(gateway, namespace)
    await producer.enqueue("t", task_id="x", queue="default")
    assert await dump(gateway, namespace) == before
    assert await handle.result() == 42


async def test_an_id_whose_record_has_expired_is_new(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await succeed(gateway, delivery, "x", b"42", Counters(1), ran=0.1, ttl=60)
    await gateway.command("PEXPIRE", partition.record("x"), 0)
    with pytest.raises(TaskNotFound):
        await handle.status()
    await producer.enqueue("t", task_id="x", queue="default")
    assert await places(gateway, partition, "x") == [READY]


async def test_a_task_that_waits_for_its_time_keeps_its_time(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", delay=60, queue="default")
    record = await handle.record()
    now = int((await gateway.command("TIME"))[0]) * 1000
    assert await places(gateway, partition, "x") == [DUE]
    assert (record.state, record.task, record.args) == (State.SCHEDULED, "t", b'{"n":1}')
    assert record.due_at is not None
    assert now + 58_000 <= record.due_at <= now + 61_000
    assert await read(await worker(gateway, partition)) == []
    before = await dump(gateway, namespace)
    await producer.enqueue("t", {"n": 1}, task_id="x", delay=600, queue="default")
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    assert await dump(gateway, namespace) == before


async def test_one_call_stores_many_in_their_order(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handles = await producer.enqueue_many("t", ({"n": n} for n in range(1_203)), queue="default")
    a = await worker(gateway, partition)
    deliveries = await read(a, 2_000)
    assert ids(deliveries) == [handle.id for handle in handles]
    assert [delivery.fields[b"args"] for delivery in deliveries] == [b'{"n":%d}' % n for n in range(1_203)]
    assert len({handle.id for handle in handles}) == 1_203


async def test_many_are_sent_in_slices_of_500(gateway: Gateway, producer: Producer) -> None:
    needs_server(gateway, "INFO commandstats is not kept")
    await producer.enqueue("t", queue="default")
    before = await script_calls(gateway)
    await producer.enqueue_many("t", [{"n": n} for n in range(1_203)], queue="default")
    assert await script_calls(gateway) - before == 3


async def test_large_ones_are_sent_in_slices_of_4_mib(gateway: Gateway, producer: Producer) -> None:
    needs_server(gateway, "INFO commandstats is not kept")
    await producer.enqueue("t", queue="default")
    before = await script_calls(gateway)
    await producer.enqueue_many(
        "t", [{"text": "x" * 900_000} for _ in range(9)], queue="default"
    )  # four fit into 4 MiB
    assert await script_calls(gateway) - before == 3


async def test_none_is_no_work(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    assert await producer.enqueue_many("t", [], queue="default") == []
    assert await dump(gateway, namespace) == {
        namespace.queues.encode(): (True, {b"default": b"1"}),
        namespace.deployment.encode(): (True, {b"format": str(KEY_FORMAT).encode()}),
    }


async def test_what_is_too_large_keeps_the_whole_batch_back(
    gateway: Gateway, namespace: Namespace, namespace_name: str
) -> None:
    async with Producer(namespace=namespace_name, gateway=gateway, payload_limit=200, large_limit=0) as producer:
        with pytest.raises(PayloadTooLarge, match="over the limit of 200 bytes") as refused:
            await producer.enqueue_many("t", [{"n": 1}, {"text": "x" * 200}], queue="default")
    assert refused.value.size > refused.value.limit == 200
    assert await dump(gateway, namespace) == {}


async def test_the_limit_itself_is_allowed(gateway: Gateway, namespace_name: str) -> None:
    exactly = EnvelopeTemplate("t").message(b"{}")
    size = len(exactly.envelope) + len(b"{}")
    async with Producer(namespace=namespace_name, gateway=gateway, payload_limit=size) as exact:
        await exact.send([exactly], queue="default")
    async with Producer(namespace=namespace_name, gateway=gateway, payload_limit=size - 1, large_limit=0) as short:
        with pytest.raises(PayloadTooLarge):
            await short.send([exactly], queue="default")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"args": {"when": object()}}, TypeError),
        ({"delay": -1.0}, ValueError),
        ({"delay": float("inf")}, ValueError),
        ({"queue": "no spaces"}, ValueError),
        ({"queue": "a:b"}, ValueError),
        ({"queue": "~released"}, ValueError),
        ({"task_id": "a:b"}, ValueError),
        ({"task_id": "x" * 129}, ValueError),
        ({"timeout": 0.0}, ValueError),
        ({"timeout": float("inf")}, ValueError),
        ({"max_attempts": 0}, ValueError),
        ({"result_ttl": -5.0}, ValueError),
    ],
)
async def test_what_cannot_be_sent_leaves_nothing(
    gateway: Gateway, namespace: Namespace, producer: Producer, wrong: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await producer.enqueue("t", **{"queue": "default", **wrong})  # type: ignore[arg-type]
    assert await dump(gateway, namespace) == {}


async def test_a_task_without_a_name_is_refused(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    with pytest.raises(ValueError, match="task"):
        await producer.enqueue("", queue="default")
    assert await dump(gateway, namespace) == {}


async def test_a_lost_reply_stores_one_task(gateway: Gateway, partition: Partition, namespace_name: str) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with (
        lossy_gateway(gateway) as (lossy, line),
        Producer(namespace=namespace_name, gateway=lossy) as producer,
    ):
        line.lose(queue_script("enqueue").sha.encode())
        now = await producer.enqueue("t", queue="default")
        line.lose(queue_script("schedule").sha.encode())
        later = await producer.enqueue("t", delay=60, queue="default")
        assert line.lost == 2
    assert await places(gateway, partition, now.id) == [READY]
    assert await places(gateway, partition, later.id) == [DUE]
    assert await gateway.command("XLEN", partition.ready) == 1
    assert await gateway.command("ZCARD", partition.due) == 1


async def test_a_lost_reply_does_not_store_again_what_was_taken_meanwhile(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """The script is asked again after the task was read, claimed and rescheduled by others: still known."""
    envelope = Envelope(id="x", task="t").encode()
    keys = [partition.ready, partition.closed, partition.timeline, partition.record("x")]
    arguments: list[Argument] = ["x", envelope, b"{}", "", ""]
    ask = (queue_script("enqueue"), keys, arguments)
    assert await gateway.run(*ask) == [1]
    delivery = await take_over(gateway, await read_one(await worker(gateway, partition)))
    before = await dump(gateway, namespace)
    assert await gateway.run(*ask) == [0]
    assert await dump(gateway, namespace) == before
    await succeed(gateway, delivery, "x", b"null", Counters(), ran=0, ttl=60)
    assert await gateway.run(*ask) == [0]
    assert await places(gateway, partition, "x") == ["succeeded"]


async def test_a_queue_is_known_by_its_first_task(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await producer.enqueue("t", queue="mail")
    await producer.enqueue("t", queue="video", delay=60)
    assert await gateway.command("HKEYS", namespace.queues) == [b"mail", b"video"]


async def test_queues_and_namespaces_do_not_mix(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    mail, video = namespace.partition("mail"), namespace.partition("video")
    stranger = Namespace(namespace.name + "2").partition("mail")
    await producer.enqueue("t", task_id="x", queue="mail")
    await producer.enqueue("t", task_id="x", queue="video", delay=60)
    assert await places(gateway, mail, "x") == [READY]
    assert await places(gateway, video, "x") == [DUE]
    assert await places(gateway, stranger, "x") == []
    assert await promote(gateway, mail, "x") == 0


async def test_a_task_is_found_by_its_id_alone(producer: Producer) -> None:
    assert await producer.find("nowhere") is None
    handle = await producer.enqueue("t", queue="mail")
    found = await producer.find(handle.id)
    assert found is not None
    assert found.partition == handle.partition
    assert await producer.find("nowhere") is None
