"""What one worker does for all: due sets are watched by one of them, and rounds that come in turns are made by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from perdure import App, Context, Settings
from perdure.queues import (
    Gateway,
    Namespace,
    Partition,
    PartitionAssignment,
    Producer,
    WorkerInfo,
    announce,
    promote_due,
    take_turns,
    watch_due,
)
from perdure.worker.runtime.maintenance import promoter as promoter_module
from perdure.worker.runtime.maintenance.janitor import Janitor
from perdure.worker.runtime.maintenance.promoter import Promoter

from tests.support.consumers import worker
from tests.support.task_places import DUE, READY, all_places
from tests.support.workers import soon, until, working

INFO = WorkerInfo(
    id="a", app="x", host="h", pid=7, version="0.1", queues=("default",), concurrency=8, in_flight=3, started=0
)


# who watches


async def test_the_first_watches_and_the_others_hear_for_how_long(gateway: Gateway, partition: Partition) -> None:
    assert await watch_due(gateway, partition, "a") == 0
    waits = [await watch_due(gateway, partition, name) for name in ("b", "c")]
    assert all(0 < wait <= 2.5 for wait in waits)
    assert await watch_due(gateway, partition, "a") == 0


async def test_whoever_is_told_of_a_due_time_takes_over(gateway: Gateway, partition: Partition) -> None:
    await watch_due(gateway, partition, "a")
    assert await watch_due(gateway, partition, "b", take_over=True) == 0
    assert await watch_due(gateway, partition, "a") > 0
    assert await watch_due(gateway, partition, "b") == 0


async def test_a_watcher_that_died_is_followed(gateway: Gateway, partition: Partition) -> None:
    await watch_due(gateway, partition, "a")
    assert 0 < await gateway.command("PTTL", partition.watch) <= 2500
    await gateway.command("PEXPIRE", partition.watch, 0)
    assert await watch_due(gateway, partition, "b") == 0
    assert await watch_due(gateway, partition, "a") > 0


async def test_of_many_that_find_nobody_watching_one_begins(gateway: Gateway, partition: Partition) -> None:
    waits = await asyncio.gather(*(watch_due(gateway, partition, f"w{number}") for number in range(50)))
    assert waits.count(0) == 1


async def test_a_watcher_that_leaves_calls_another_at_once(gateway: Gateway, partition: Partition) -> None:
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await watch_due(gateway, partition, "a")
    await b.leave()
    assert await gateway.command("GET", partition.watch) == b"a"
    await a.leave()
    assert await gateway.command("GET", partition.watch) is None
    c = await worker(gateway, partition, name="c")
    assert (await c.read(1, block=None)).due


# the promoter


async def promoting(gateway: Gateway, partition: Partition, name: str) -> tuple[Promoter, asyncio.Task[None]]:
    promoter = Promoter(gateway, [partition], name)
    return promoter, asyncio.create_task(promoter.run())


async def placed(gateway: Gateway, partition: Partition, task_id: str, place: str) -> None:
    """Return once the task is there."""

    async def is_there() -> bool:
        return (await all_places(gateway, partition, [task_id]))[task_id] == [place]

    await until(is_there, f"{task_id} is {place}")


async def test_a_due_task_is_sought_by_the_watcher_and_by_nobody_else(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The herd: everybody who knew of the due time came for it, and each tried each task."""
    sought: list[Partition] = []

    async def promote(gateway: Gateway, partition: Partition) -> Any:
        sought.append(partition)
        return await promote_due(gateway, partition)

    monkeypatch.setattr(promoter_module, "promote_due", promote)
    await producer.enqueue("t", task_id="x", delay=60)
    crew = [await promoting(gateway, partition, f"w{number}") for number in range(30)]
    try:

        async def watched() -> bool:
            return bool(sought)

        await until(watched, "somebody watches")
        await producer.enqueue("t", task_id="soon", delay=0.02)
        crew[7][0].hear()
        await placed(gateway, partition, "soon", READY)
        assert await all_places(gateway, partition, ["x"]) == {"x": [DUE]}
        assert len(sought) <= 10  # each second once, and once for each due time or poke
    finally:
        for _, running in crew:
            running.cancel()
        await asyncio.gather(*(running for _, running in crew), return_exceptions=True)


async def test_when_the_watcher_is_gone_another_promotes(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await watch_due(gateway, partition, "dead")
    await producer.enqueue("t", task_id="x", delay=0.001)
    _, running = await promoting(gateway, partition, "b")
    try:
        await placed(gateway, partition, "x", READY)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.integration
async def test_a_retry_comes_due_whichever_worker_watches(settings: Settings) -> None:
    async with App("watch", settings=settings) as app:
        tried: Counter[int] = Counter()

        @app.task
        async def again(ctx: Context, number: int) -> int:
            tried[number] += 1
            if tried[number] < 3:
                raise ValueError("again")
            return number

        async with working(app), working(app), working(app):
            handles = [await again.enqueue(number) for number in range(5)]
            assert [await soon(handle.result()) for handle in handles] == list(range(5))


# turns


async def test_a_turn_is_one_workers_until_its_time_is_over(gateway: Gateway, namespace: Namespace) -> None:
    first, second = namespace.partition("first"), namespace.partition("second")
    turns = {first: first.cleaning, second: second.cleaning}
    assert await take_turns(gateway, {first: first.cleaning}, "a", 30.0) == [first]
    assert await take_turns(gateway, turns, "b", 30.0) == [second]
    assert await take_turns(gateway, turns, "a", 30.0) == []
    assert 29_000 < await gateway.command("PTTL", first.cleaning) <= 30_000
    await gateway.command("PEXPIRE", first.cleaning, 0)
    assert await take_turns(gateway, turns, "c", 30.0) == [first]


async def test_of_many_janitors_one_cleans_up(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    cleaned: list[str] = []

    def janitor(consumer: Any, name: str) -> Janitor:
        async def forget(partition: Partition, gone_for: float, present: Sequence[str]) -> int:
            cleaned.append(name)
            return 0

        consumer.remove_idle_consumers = forget
        return Janitor(gateway, namespace, coverage, consumer, dead_letter_ttl=60.0, result_ttl=60.0, worker=name)

    coverage = PartitionAssignment(gateway, namespace, [partition.queue], "w0", share=False)
    await coverage.refresh()
    await announce(gateway, namespace, INFO, ttl=30.0)
    crew = [janitor(await worker(gateway, partition, name=f"w{number}"), f"w{number}") for number in range(10)]
    await asyncio.gather(*(one.clean() for one in crew))
    assert len(cleaned) == 1
    await gateway.command("PEXPIRE", partition.cleaning, 0)
    await crew[3].clean()
    assert cleaned[1:] == ["w3"]
