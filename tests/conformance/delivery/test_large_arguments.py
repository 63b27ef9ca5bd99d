"""Large arguments in Redis: uploaded before their task, part of its record from the enqueue on, deleted with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from perdure.deadletter.burial import Evidence, bury
from perdure.deadletter.letters import find_letter
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    DecryptionError,
    Encryptor,
    Gateway,
    Namespace,
    Partition,
    PayloadTooLarge,
    Producer,
    TamperedData,
    TaskExists,
    TaskHandle,
)
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.derived_tasks import Successor, enqueue_successor, read_task_input, store_fork
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.errors import LargeValueLost, NotEncrypted
from perdure.queues.transport.large_values import CHUNK_BYTES, LARGE_ARGUMENTS, LargeArguments

from tests.support.consumers import make_due, promote, read_one, worker
from tests.support.task_places import lifetimes

TEXT = "0123456789" * 120_000
ARGUMENTS = {"text": TEXT}
JSON = orjson.dumps(ARGUMENTS)


async def uploads(gateway: Gateway, partition: Partition) -> dict[str, int]:
    """Return the uploads of the partition, and their TTLs in milliseconds."""
    pattern = partition.upload("*", "*").replace("{", "[{]").replace("}", "[}]")
    _, keys = await gateway.command("SCAN", 0, "MATCH", pattern, "COUNT", 1000, node_of=partition.ready)
    return {key.decode(): await gateway.command("PTTL", key) for key in keys}


async def chunks(gateway: Gateway, partition: Partition, task_id: str = "x") -> list[str]:
    names = await gateway.command("HKEYS", partition.record(task_id))
    return sorted(name.decode() for name in names if name.startswith(b"args:"))


async def enqueue(producer: Producer, **how: Any) -> None:
    await producer.enqueue("t", ARGUMENTS, task_id="x", queue="default", **how)


async def enqueue_many(producer: Producer) -> None:
    tasks = [("a", b"{}"), ("x", JSON), ("b", b"{}"), ("x", JSON)]
    messages = [EnvelopeTemplate("t").message(data, task_id=task_id) for task_id, data in tasks]
    handles: list[TaskHandle[Any]] = await producer.send(messages, queue="default")
    assert [handle.id for handle in handles] == ["a", "x", "b", "x"]


async def enqueue_fresh(producer: Producer) -> None:
    earlier = await producer.enqueue("t", task_id="x", queue="default")
    await earlier.cancel()
    await producer.enqueue_fresh(EnvelopeTemplate("t").message(JSON, task_id="x"), queue="default")


async def continue_as(producer: Producer) -> None:
    following = Successor(Envelope(id="x", task="t"), "default", JSON, ("#received", b"{}"), "first token")
    await enqueue_successor(producer.gateway, producer.namespace, following)
    await enqueue_successor(producer.gateway, producer.namespace, following)


async def fork(producer: Producer) -> None:
    gateway, partition = producer.gateway, producer.namespace.partition("default")
    await producer.enqueue("t", ARGUMENTS, task_id="origin", queue="default")
    origin = await read_task_input(gateway, partition, "origin")
    copied: dict[str, Any] = {"arguments": origin.arguments, "event": b"{}", "fields": {}}
    await store_fork(gateway, producer.namespace, origin, "x", at="origin 0-0", **copied)


async def delayed(producer: Producer) -> None:
    await enqueue(producer, delay=60)
    partition = producer.namespace.partition("default")
    await make_due(producer.gateway, partition, "x")
    await promote(producer.gateway, partition)


WAYS: tuple[Callable[[Producer], Awaitable[None]], ...] = (
    enqueue,
    enqueue_many,
    enqueue_fresh,
    continue_as,
    fork,
    delayed,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_each_way_to_store_a_task_stores_its_large_arguments(
    gateway: Gateway, partition: Partition, producer: Producer, way: Callable[[Producer], Awaitable[None]]
) -> None:
    await way(producer)
    stored = await read_task_input(gateway, partition, "x")
    assert stored.arguments == JSON
    assert stored.envelope.requires == LARGE_ARGUMENTS, "older workers leave it to newer ones"
    assert len(await chunks(gateway, partition)) == 3
    assert await gateway.command("PTTL", partition.record("x")) == -1
    assert await uploads(gateway, partition) == {}


async def test_chunks_expire_with_the_outcome(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await enqueue(producer)
    delivery = await read_one(await worker(gateway, partition))
    await succeed(gateway, delivery, "x", b"1", Counters(1), ran=0.1, ttl=60)
    assert (await lifetimes(gateway, partition, "x"))["record"] > 0
    assert (await read_task_input(gateway, partition, "x")).arguments == JSON


async def test_a_producer_that_dies_before_the_enqueue_leaves_only_keys_with_a_ttl(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Gateway.run

    async def until_enqueue(self: Gateway, script: Any, keys: Any, args: Any) -> Any:
        if script.name == "enqueue_one":
            raise KeyboardInterrupt
        return await run(self, script, keys, args)

    monkeypatch.setattr(Gateway, "run", until_enqueue)
    with pytest.raises(KeyboardInterrupt):
        await enqueue(producer)
    (ttl,) = (await uploads(gateway, partition)).values()
    assert 0 < ttl <= 600_000
    assert not await gateway.command("EXISTS", partition.record("x"), partition.ready)


async def test_an_upload_that_lost_chunks_is_repeated_and_never_enqueued(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, lost = LargeArguments.upload, [1, 2]

    async def lossy(self: LargeArguments, gateway: Gateway, key: str) -> None:
        await upload(self, gateway, key)
        if lost:
            await gateway.command("HDEL", key, f"args:{self.reference.digest}:{lost.pop()}")

    monkeypatch.setattr(LargeArguments, "upload", lossy)
    await enqueue(producer)
    assert (await read_task_input(gateway, partition, "x")).arguments == JSON
    lost[:] = range(3)
    with pytest.raises(LargeValueLost, match="expired before the task was stored"):
        await producer.enqueue("t", ARGUMENTS, task_id="y", queue="default")
    assert not await gateway.command("EXISTS", partition.record("y"))
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_repeated_id_compares_large_arguments(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer)
    before = await chunks(gateway, partition)
    await enqueue(producer)
    for other in ({"text": TEXT[:-1] + "x"}, {"text": "small"}):
        with pytest.raises(TaskExists, match="text"):
            await producer.enqueue("t", other, task_id="x", queue="default")
    assert await chunks(gateway, partition) == before
    assert all(ttl > 0 for ttl in (await uploads(gateway, partition)).values())


async def test_the_limits(producer: Producer) -> None:
    small = Producer(namespace=producer.namespace.name, gateway=producer.gateway, payload_limit=1024, large_limit=4096)
    await small.enqueue("t", {"text": "x" * 4000}, queue="default")
    with pytest.raises(PayloadTooLarge, match=r"the task's arguments is 5,\d+ bytes, .* raise PERDURE_LARGE_LIMIT"):
        await small.enqueue("t", {"text": "x" * 5000}, queue="default")
    with pytest.raises(PayloadTooLarge, match="the task's envelope"):
        await small.enqueue("t", {}, headers={"text": "x" * 2000}, queue="default")
    small.large_limit = 0
    with pytest.raises(PayloadTooLarge, match="over the limit of 1,024 bytes"):
        await small.enqueue("t", {"text": "x" * 2000}, queue="default")


async def dead(gateway: Gateway, partition: Partition) -> None:
    delivery = await read_one(await worker(gateway, partition))
    evidence = Evidence.of(ValueError("broken"))
    await bury(gateway, delivery, "x", task="t", reason=Reason.NOT_RETRYABLE, evidence=evidence, counters=Counters(1))


async def test_a_dead_letter_keeps_them_for_its_replay(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer)
    await dead(gateway, partition)
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    shown = f"({len(JSON):,} bytes, stored in 3 chunks)"
    assert letter.summary()["args"] == shown
    assert await replay(gateway, letter, Replay())
    assert (await read_task_input(gateway, partition, "x")).arguments == JSON
    assert await gateway.command("PTTL", partition.record("x")) == -1


async def test_new_arguments_replace_them(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await enqueue(producer)
    await dead(gateway, partition)
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await replay(gateway, letter, Replay(args=b'{"text":"new"}'))
    assert (await read_task_input(gateway, partition, "x")).arguments == b'{"text":"new"}'
    assert await chunks(gateway, partition) == []


async def test_new_arguments_do_not_replace_encrypted_ones_without_a_key(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(32)]))
    await enqueue(producer)
    await dead(gateway, partition)
    monkeypatch.setattr(gateway, "encryptor", Encryptor())
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    with pytest.raises(DecryptionError):
        await replay(gateway, letter, Replay(args=b'{"text":"secret"}'))
    assert await chunks(gateway, partition) != []


async def test_new_arguments_replace_those_that_lost_a_chunk(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer)
    await dead(gateway, partition)
    for name in (await chunks(gateway, partition))[:2]:
        await gateway.command("HDEL", partition.record("x"), name)
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await replay(gateway, letter, Replay(args=b'{"text":"new"}'))
    assert (await read_task_input(gateway, partition, "x")).arguments == b'{"text":"new"}'


async def test_missing_and_changed_chunks_are_noticed(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer)
    name = (await chunks(gateway, partition))[1]
    await gateway.command("HSET", partition.record("x"), name, b"1" * CHUNK_BYTES)
    with pytest.raises(LargeValueLost, match="could not read the arguments of task x: its chunks were changed"):
        await read_task_input(gateway, partition, "x")
    await gateway.command("HDEL", partition.record("x"), name)
    with pytest.raises(LargeValueLost, match="chunk 2 of 3 is missing"):
        await read_task_input(gateway, partition, "x")


async def test_they_are_encrypted_and_bound_to_their_task(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await producer.enqueue("t", ARGUMENTS, task_id="plain", queue="default")
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(32)], required=True))
    await enqueue(producer)
    assert (await read_task_input(gateway, partition, "x")).arguments == JSON
    names = await chunks(gateway, partition)
    stored = [await gateway.command("HGET", partition.record("x"), name) for name in names]
    assert not any(TEXT[:100].encode() in chunk for chunk in stored)
    await enqueue(producer)  # the same arguments under another nonce
    with pytest.raises(NotEncrypted):
        await read_task_input(gateway, partition, "plain")
    await producer.enqueue("t", ARGUMENTS, task_id="y", queue="default")
    for name, chunk in zip(names, stored, strict=True):
        await gateway.command("HSET", partition.record("y"), name, chunk)
    entry = await gateway.command("HGET", partition.record("x"), "entry")
    await gateway.command("HSET", partition.record("y"), "entry", entry)
    with pytest.raises(TamperedData):
        await read_task_input(gateway, partition, "y")
