"""Fleet locks, and the chores that one worker at a time does: promoting, claiming, cleaning up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from perdure import App, Context, Settings
from perdure.queues import Gateway, Namespace, Partition, Producer, WorkerInfo
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.fleet_locks import acquire_fleet_locks
from perdure.queues.delivery.paused_tasks import wake_paused
from perdure.queues.partitions.assignment import PartitionAssignment
from perdure.queues.pauses import Pauses
from perdure.queues.presence import announce
from perdure.queues.runtime import RUNTIME
from perdure.worker.runtime.maintenance import promoter as promoter_module
from perdure.worker.runtime.maintenance.janitor import Janitor
from perdure.worker.runtime.maintenance.promoter import Promoter

from tests.support.consumers import worker
from tests.support.task_places import DUE, READY, all_places
from tests.support.workers import bounded, running_worker, wait_until

INFO = WorkerInfo(
    id="a", app="x", host="h", pid=7, version="0.1", queues=("default",), concurrency=8, in_flight=3, started=0
)


# locks that their holder renews


async def lock(gateway: Gateway, partition: Partition, name: str, *, take_over: bool = False) -> float:
    """Acquire or renew the lock of the due set; return the seconds to wait for it."""
    locks = {partition: partition.promote_lock}
    return (await acquire_fleet_locks(gateway, locks, name, 2.5, renew=True, take_over=take_over))[partition]


async def test_the_first_worker_holds_the_lock_and_others_get_the_time_to_wait(
    gateway: Gateway, partition: Partition
) -> None:
    assert await lock(gateway, partition, "a") == 0
    waits = [await lock(gateway, partition, name) for name in ("b", "c")]
    assert all(0 < wait <= 2.5 for wait in waits)
    assert await lock(gateway, partition, "a") == 0


async def test_a_worker_takes_a_lock_over(gateway: Gateway, partition: Partition) -> None:
    await lock(gateway, partition, "a")
    assert await lock(gateway, partition, "b", take_over=True) == 0
    assert await lock(gateway, partition, "a") > 0
    assert await lock(gateway, partition, "b") == 0


async def test_the_lock_of_a_dead_worker_expires(gateway: Gateway, partition: Partition) -> None:
    await lock(gateway, partition, "a")
    assert 0 < await gateway.command("PTTL", partition.promote_lock) <= 2500
    await gateway.command("PEXPIRE", partition.promote_lock, 0)
    assert await lock(gateway, partition, "b") == 0
    assert await lock(gateway, partition, "a") > 0


@pytest.mark.parametrize("renew", [True, False])
async def test_a_lock_that_lasts_far_longer_than_its_ttl_is_taken_over(
    gateway: Gateway, partition: Partition, renew: bool
) -> None:
    """The clock of Redis was set back by ten minutes, and the holder may be dead."""
    locks = {partition: partition.sweep_lock}
    await acquire_fleet_locks(gateway, locks, "a", 2.5)
    assert (await acquire_fleet_locks(gateway, locks, "b", 2.5, renew=renew))[partition] > 0
    await gateway.command("PEXPIRE", partition.sweep_lock, 602_500)
    assert (await acquire_fleet_locks(gateway, locks, "b", 2.5, renew=renew))[partition] == 0
    assert 0 < await gateway.command("PTTL", partition.sweep_lock) <= 2_500
    assert (await acquire_fleet_locks(gateway, locks, "a", 2.5, renew=renew))[partition] > 0


async def test_renewing_extends_the_lock(gateway: Gateway, partition: Partition) -> None:
    await lock(gateway, partition, "a")
    await gateway.command("PEXPIRE", partition.promote_lock, 100_000)
    assert await lock(gateway, partition, "a") == 0
    assert await gateway.command("PTTL", partition.promote_lock) <= 2500


async def test_one_of_many_workers_acquires_a_free_lock(gateway: Gateway, partition: Partition) -> None:
    waits = await asyncio.gather(*(lock(gateway, partition, f"w{number}") for number in range(50)))
    assert waits.count(0) == 1


async def test_a_watcher_that_leaves_wakes_another_worker(gateway: Gateway, partition: Partition) -> None:
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await lock(gateway, partition, "a")
    await b.leave()
    assert await gateway.command("GET", partition.promote_lock) == b"a"
    await a.leave()
    assert await gateway.command("GET", partition.promote_lock) is None
    c = await worker(gateway, partition, name="c")
    assert (await c.read(1, block=None)).due


# the promoter


async def promoting(gateway: Gateway, partition: Partition, name: str) -> tuple[Promoter, asyncio.Task[None]]:
    promoter = Promoter(gateway, [partition], name, (await worker(gateway, partition, name=name)).touch)
    return promoter, asyncio.create_task(promoter.run())


async def placed(gateway: Gateway, partition: Partition, task_id: str, place: str) -> None:
    """Wait until the task is there."""

    async def is_there() -> bool:
        return (await all_places(gateway, partition, [task_id]))[task_id] == [place]

    await wait_until(is_there, f"{task_id} is {place}")


async def test_only_the_watcher_looks_for_due_tasks(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock every worker that knew the due time would look for the task, and try to promote it."""
    sought: list[Partition] = []

    async def promote(gateway: Gateway, partition: Partition, **options: Any) -> Any:
        sought.append(partition)
        return await promote_due(gateway, partition, **options)

    monkeypatch.setattr(promoter_module, "promote_due", promote)
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    crew = [await promoting(gateway, partition, f"w{number}") for number in range(30)]
    try:

        async def watched() -> bool:
            return bool(sought)

        await wait_until(watched, "a worker holds the lock")
        await producer.enqueue("t", task_id="soon", delay=0.02, queue="default")
        crew[7][0].take_over()
        await placed(gateway, partition, "soon", READY)
        assert await all_places(gateway, partition, ["x"]) == {"x": [DUE]}
        assert len(sought) <= 10  # once per second, and once for each due time or nudge
    finally:
        for _, running in crew:
            running.cancel()
        await asyncio.gather(*(running for _, running in crew), return_exceptions=True)


async def test_another_worker_promotes_after_the_watcher_left(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await lock(gateway, partition, "dead")
    await producer.enqueue("t", task_id="x", delay=0.001, queue="default")
    _, running = await promoting(gateway, partition, "b")
    try:
        await placed(gateway, partition, "x", READY)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_holder_of_the_lock_does_not_ask_for_it_at_each_promotion(
    gateway: Gateway, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks in time to extend the lock, and another worker takes it over meanwhile if a nudge reaches that one."""
    asked = list[str]()

    async def counted(gateway: Gateway, locks: Any, name: str, ttl: float, **more: Any) -> dict[Any, float]:
        asked.append(name)
        return await acquire_fleet_locks(gateway, locks, name, ttl, **more)

    monkeypatch.setattr(promoter_module, "acquire_fleet_locks", counted)
    first, second = [
        Promoter(gateway, [partition], name, (await worker(gateway, partition, name=name)).touch) for name in "ab"
    ]
    waits = [await first._promote(partition, False) for _ in range(5)]
    assert (asked, waits) == (["a"], [1.0] * 5)
    monkeypatch.setattr(first, "_held", {partition: RUNTIME.monotonic()})
    await first._promote(partition, False)
    assert asked == ["a", "a"]
    assert 1.0 < await second._promote(partition, False) <= 3.0
    assert await second._promote(partition, True) == 1.0
    assert await gateway.command("GET", partition.promote_lock) == b"b"
    assert await first._promote(partition, False) == 1.0
    assert await gateway.command("GET", partition.promote_lock) == b"b"


@pytest.mark.integration
async def test_a_retry_is_promoted_whichever_worker_watches(settings: Settings) -> None:
    async with App("watch", settings=settings) as app:
        tried: Counter[int] = Counter()

        @app.task
        async def again(ctx: Context, number: int) -> int:
            tried[number] += 1
            if tried[number] < 3:
                raise ValueError("again")
            return number

        async with running_worker(app), running_worker(app), running_worker(app):
            handles = [await again.enqueue(number) for number in range(5)]
            assert [await bounded(handle.result()) for handle in handles] == list(range(5))


# locks that expire


async def acquired(gateway: Gateway, locks: dict[Partition, str], name: str) -> list[Partition]:
    waits = await acquire_fleet_locks(gateway, locks, name, 30.0)
    return [partition for partition, wait in waits.items() if not wait]


async def test_a_lock_is_held_until_its_ttl_has_passed(gateway: Gateway, namespace: Namespace) -> None:
    first, second = namespace.partition("first"), namespace.partition("second")
    locks = {first: first.clean_lock, second: second.clean_lock}
    assert await acquired(gateway, {first: first.clean_lock}, "a") == [first]
    assert await acquired(gateway, locks, "b") == [second]
    assert await acquired(gateway, locks, "a") == []
    assert 29_000 < await gateway.command("PTTL", first.clean_lock) <= 30_000
    await gateway.command("PEXPIRE", first.clean_lock, 0)
    assert await acquired(gateway, locks, "c") == [first]


async def test_one_of_many_janitors_cleans_up(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    cleaned: list[str] = []

    def janitor(consumer: Any, name: str) -> Janitor:
        async def forget(partition: Partition, gone_for: float, present: Sequence[str]) -> int:
            cleaned.append(name)
            return 0

        consumer.remove_idle_consumers = forget
        given: Any = {"worker": name, "wake_paused": partial(wake_paused, gateway, pauses=Pauses())}
        return Janitor(gateway, namespace, assignment, consumer, dead_letter_ttl=lambda: 60.0, **given)

    assignment = PartitionAssignment(gateway, namespace, [partition.queue], "w0", share=False)
    await assignment.refresh()
    await announce(gateway, namespace, INFO, ttl=30.0)
    crew = [janitor(await worker(gateway, partition, name=f"w{number}"), f"w{number}") for number in range(10)]
    await asyncio.gather(*(one.clean() for one in crew))
    assert len(cleaned) == 1
    await gateway.command("PEXPIRE", partition.clean_lock, 0)
    await crew[3].clean()
    assert cleaned[1:] == ["w3"]


async def test_a_lock_without_a_ttl_is_taken(gateway: Gateway, partition: Partition) -> None:
    """Another program has written it: without a TTL, the chore would be done by no worker."""
    await gateway.command("SET", partition.promote_lock, b"\xff")
    locks = {partition: partition.promote_lock}
    assert (await acquire_fleet_locks(gateway, locks, "a", 2.5, renew=True))[partition] == 0
    assert await gateway.command("GET", partition.promote_lock) == b"a"
    await gateway.command("PERSIST", partition.promote_lock)
    assert (await acquire_fleet_locks(gateway, locks, "b", 2.5))[partition] == 0
    assert 0 < await gateway.command("PTTL", partition.promote_lock) <= 2500
