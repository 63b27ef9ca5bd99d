"""Enqueuing as it comes: any iterable, in constant memory, each handle of a task that is stored."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from perdure import App, Context, InvalidArguments, Settings
from perdure.queues import Gateway, Namespace, Partition, Producer, set_partitions

from tests.support.consumers import ids, read, worker


def rows(count: int) -> Iterator[Mapping[str, Any]]:
    for number in range(count):
        yield {"n": number}


async def coming(count: int) -> AsyncIterator[Mapping[str, Any]]:
    for row in rows(count):
        yield row


@pytest.mark.parametrize("source", [rows, coming])
async def test_a_stream_stores_each_and_in_order(
    gateway: Gateway, partition: Partition, producer: Producer, source: Any
) -> None:
    handles = [handle async for handle in producer.enqueue_stream("t", source(1_203), queue="default")]
    assert ids(await read(await worker(gateway, partition), 2_000)) == [handle.id for handle in handles]
    more = await producer.enqueue_many("t", source(3), queue="default")
    assert len(more) == 3


async def test_a_handle_is_of_a_task_that_is_stored(producer: Producer) -> None:
    async for handle in producer.enqueue_stream("t", rows(600), queue="default"):
        assert await handle.status() == "queued"
        break


async def test_nothing_is_read_far_ahead(producer: Producer) -> None:
    """No more tasks are stored ahead than a slow reader of the handles allows."""
    read_so_far = 0

    def counted() -> Iterator[Mapping[str, Any]]:
        nonlocal read_so_far
        for row in rows(100_000):
            read_so_far += 1
            yield row

    stream = producer.enqueue_stream("t", counted(), queue="default")
    await anext(stream)
    assert read_so_far <= 1_502
    await stream.aclose()  # type: ignore[attr-defined]


async def test_what_is_refused_in_a_stream_leaves_what_came_before(gateway: Gateway, producer: Producer) -> None:
    def some() -> Iterator[Mapping[str, Any]]:
        yield from rows(1_200)
        yield {"n": object()}

    stored = 0
    with pytest.raises(TypeError, match="JSON"):
        async for _ in producer.enqueue_stream("t", some(), queue="default"):
            stored += 1
    assert stored == 500


async def test_no_task_runs_of_a_call_that_was_refused(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    async def some() -> AsyncIterator[Mapping[str, Any]]:
        yield {"n": 1}
        yield {"n": object()}

    with pytest.raises(TypeError, match="JSON"):
        await producer.enqueue_many("t", some(), queue="default")
    assert await gateway.command("EXISTS", partition.ready) == 0


async def test_a_key_that_is_no_text_is_refused(producer: Producer) -> None:
    with pytest.raises(TypeError, match="key must be a string, got 1"):
        await producer.enqueue_many("t", [{"n": 1}], key=lambda args: args["n"], queue="default")


@pytest.mark.integration
async def test_a_typed_task_streams(settings: Settings) -> None:
    app = App("stream", settings=settings)

    @app.task
    async def noop(ctx: Context, number: int) -> int:
        return number

    async with app:
        assert len([one async for one in noop.enqueue_stream({"number": n} for n in range(700))]) == 700
        keyed = noop.options(key=lambda args: f"k{args['number'] % 3}", delay=60)
        assert len([one async for one in keyed.enqueue_stream({"number": n} for n in range(9))]) == 9
        with pytest.raises(InvalidArguments):
            await noop.enqueue_many([{"number": 1}, {"number": "x"}])
        with pytest.raises(ValueError, match="key must be a text for one task"):
            await keyed.enqueue(1)
        with pytest.raises(ValueError, match="a list of ids or a function of the arguments, got one id"):
            await noop.options(task_id="x").enqueue_many([{"number": 1}])


async def forget(gateway: Gateway, namespace: Namespace) -> None:
    """Take all tasks away at once: the guard against leaks would look at each."""
    cursor = b"0"
    while True:
        cursor, page = await gateway.command("SCAN", cursor, "MATCH", f"{{{namespace.name}:*", "COUNT", 5_000)
        await gateway.pipeline([("UNLINK", namespace.queues, *page)])
        if cursor == b"0":
            return


@pytest.mark.integration
@pytest.mark.parametrize("count", [1, 4])
async def test_memory_does_not_grow_with_the_number_of_tasks(redis_url: str, namespace: Namespace, count: int) -> None:
    async with Producer(redis_url, namespace=namespace.name) as producer:
        await set_partitions(producer.gateway, namespace, "default", count)

        async def peak(number: int) -> int:
            gc.collect()
            tracemalloc.start()
            try:
                async for _ in producer.enqueue_stream("t", rows(number), queue="default"):
                    pass
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        await peak(3_000)  # what is made once
        small, large = await peak(6_000), await peak(30_000)
        await forget(producer.gateway, namespace)
    assert large < small * 1.5 + 100_000
