"""Partitions with real workers: resharding under load, shared partitions, a killed replica, and bursts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Producer, Settings, TaskHandle, Worker
from perdure.queues import set_partitions
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.partitions.resharding import PartitionStatus, load_route, partition_status
from perdure.worker.runtime.shared_settings import WorkerTimings

from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import BOUND, bounded, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration]

KEYS, ROUNDS = 6, 60
COUNTS = (4, 2, 8)


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(settings, tmp_path) as workers:
        yield workers


@pytest.fixture
async def producers(settings: Settings) -> AsyncIterator[list[Producer]]:
    """Return several producers, each of which reads the changed route by itself."""
    async with AsyncExitStack() as stack:
        made = [Producer(settings.redis_url, namespace=settings.namespace) for _ in range(KEYS)]
        yield [await stack.enter_async_context(one) for one in made]


async def load(producer: Producer, key: str, progress: Counter[str]) -> list[TaskHandle[Any]]:
    """Enqueue tasks of one key, each after the acknowledgement of the previous one."""
    handles: list[TaskHandle[Any]] = []
    for number in range(ROUNDS):
        arguments = {"key": key, "number": number, "pause": 0.002}
        handles.append(await producer.enqueue("keyed", arguments, key=key, queue="replica"))
        progress["sent"] += 1
        while number + 1 > progress["allowed"]:  # noqa: ASYNC110 - a counter of the test has no event
            await asyncio.sleep(0.005)
    return handles


async def spread_under_load(producers: list[Producer]) -> list[TaskHandle[Any]]:
    """Enqueue tasks while the queue changes from 1 to 4 to 2 to 8 partitions."""
    progress: Counter[str] = Counter()
    loads = [asyncio.create_task(load(one, f"k{number}", progress)) for number, one in enumerate(producers)]
    for turn, count in enumerate(COUNTS, 1):
        progress["allowed"] = turn * ROUNDS // (len(COUNTS) + 1)

        async def sent() -> bool:
            return progress["sent"] >= (progress["allowed"] - 1) * KEYS

        await wait_until(sent, "the producers are this far")
        progress["allowed"] += ROUNDS // 8  # producers continue during the change
        await set_partitions(producers[0].gateway, producers[0].namespace, "replica", count)
    progress["allowed"] = ROUNDS + 1
    return [handle for handles in await bounded(asyncio.gather(*loads)) for handle in handles]


@pytest.mark.processes
async def test_tasks_of_a_key_start_in_order_while_the_queue_is_resharded(
    workers: WorkerProcesses, producers: list[Producer]
) -> None:
    """One replica: the journal is in the order of its starts."""
    await workers.start(concurrency=4).ready()
    handles = await spread_under_load(producers)
    assert len({handle.partition.index for handle in handles}) > 4
    for handle in handles:
        await handle.result(timeout=BOUND)
    started = [line.key for line in workers.lines("start")]
    assert len(started) == len(set(started)) == KEYS * ROUNDS
    for number in range(KEYS):
        ours = [int(key.split(":")[1]) for key in started if key.startswith(f"k{number}:")]
        assert ours == list(range(ROUNDS)), f"key k{number}"
    assert not workers.lines("early")


@pytest.mark.processes
async def test_a_killed_replica_loses_no_task_and_keeps_the_order(
    workers: WorkerProcesses, producers: list[Producer]
) -> None:
    replicas = [workers.start(concurrency=3) for _ in range(2)]
    replicas += [workers.start(concurrency=3, partitions="share") for _ in range(2)]
    for replica in replicas:
        await replica.ready()
    spreading = asyncio.create_task(spread_under_load(producers))
    await workers.line("start", number=KEYS * ROUNDS // 3)
    replicas[2].kill()
    handles = await spreading
    assert [await handle.result(timeout=BOUND) for handle in handles] == list(range(ROUNDS)) * KEYS
    starts = Counter(line.key for line in workers.lines("start"))
    assert len(starts) == KEYS * ROUNDS
    assert sum(starts.values()) <= KEYS * ROUNDS + 3, "again only what the killed replica had"
    assert not workers.lines("early")


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    app = App("spread", settings=settings)

    @app.task
    async def double(ctx: Context, value: int) -> int:
        return value * 2

    async with app:
        yield app


def double_of(app: App) -> Any:
    return app.tasks["double"]


async def test_a_burst_drains_all_generations(app: App) -> None:
    namespace, gateway = app.producer.namespace, app.producer.gateway
    first = await double_of(app).enqueue_many([{"value": n} for n in range(20)])
    await set_partitions(gateway, namespace, app.name, 3)
    second = await double_of(app).enqueue_many([{"value": n} for n in range(20)])
    await set_partitions(gateway, namespace, app.name, 40)
    third = (
        await double_of(app)
        .options(key=lambda args: str(args["value"]))
        .enqueue_many([{"value": n} for n in range(20)])
    )
    await work_off(app, concurrency=2)
    for handles in (first, second, third):
        assert [await handle.result(timeout=0) for handle in handles] == [n * 2 for n in range(20)]
    assert {handle.partition.index for handle in first} == {0}
    assert {handle.partition.index for handle in second} <= {1, 2, 3}
    assert {handle.partition.index for handle in third} <= set(range(4, 44))


async def test_more_partitions_than_slots_are_all_read(app: App) -> None:
    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, 9)
    async with running_worker(app, concurrency=2):
        handles = await double_of(app).enqueue_many([{"value": n} for n in range(900)])
        assert {handle.partition.index for handle in handles} == set(range(9))
        for handle in handles:
            await handle.result(timeout=BOUND)
        for _ in range(9):
            assert await bounded((await double_of(app).enqueue(21)).result()) == 42


async def test_a_worker_completes_an_interrupted_resharding(app: App) -> None:
    """The route has changed, and no partition is closed: the command stopped after its first write."""
    namespace, gateway = app.producer.namespace, app.producer.gateway
    async with running_worker(app):
        await (await double_of(app).enqueue(1)).result(timeout=BOUND)
        route = await load_route(gateway, namespace, app.name)
        assert route is not None
        await gateway.command("HSET", namespace.queues, app.name, route.changed(2).encode())

        async def closed() -> bool:
            return await partition_status(gateway, namespace.partition(app.name, 0)) >= PartitionStatus.CLOSED

        await wait_until(closed, "a worker closes the former partition")
        handle = await double_of(app).enqueue(21)
        assert handle.partition.index in (1, 2)
        assert await bounded(handle.result()) == 42


async def test_workers_that_share_partitions_run_all_tasks(app: App) -> None:
    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, 6)
    async with Worker(app, partitions="share") as one, Worker(app, partitions="share") as other:
        running = [asyncio.create_task(worker.run()) for worker in (one, other)]
        handles = await double_of(app).enqueue_many([{"value": n} for n in range(300)])
        for handle in handles:
            await handle.result(timeout=BOUND)
        for worker in (one, other):
            worker.stop()
        await bounded(asyncio.gather(*running))
    assert one.settled + other.settled == 300
    assert await app.producer.gateway.command("ZCOUNT", app.producer.namespace.sharing(app.name), 0, "+inf") == 0


async def test_a_worker_without_partitions_waits_for_an_assignment(app: App) -> None:
    """One partition has two readers at most: the third worker waits until both leave."""
    sharing = app.producer.namespace.sharing(app.name)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(app, partitions="share")) for _ in range(3)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            assert await bounded((await double_of(app).enqueue(21)).result()) == 42
            worker.stop()  # the worker leaves after its tasks end

            async def left(worker: Worker = worker) -> bool:
                return float(await app.producer.gateway.command("ZSCORE", sharing, worker.id) or -1) < 0

            await wait_until(left, "its share is the others'")
        await bounded(asyncio.gather(*running))


async def test_delayed_tasks_of_an_earlier_generation_run(app: App) -> None:
    namespace, gateway = app.producer.namespace, app.producer.gateway
    later = await double_of(app).options(delay=0.5).enqueue(21)
    await set_partitions(gateway, namespace, app.name, 2)
    async with running_worker(app):
        assert await bounded((await double_of(app).enqueue(1)).result()) == 2
        assert await bounded(later.result()) == 42
    assert len(await queue_partitions(gateway, namespace, app.name)) == 3


async def test_an_id_outlives_a_change_of_partitions_as_long_as_its_record(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer asked for an hour; other outcomes are kept for a moment, and their partition is retired."""
    monkeypatch.setattr(Worker, "timings", WorkerTimings(clean_interval=0.02, clean_lock=0.02))
    app = App("bank", settings=settings.model_copy(update={"result_ttl": 0.01, "dead_letter_ttl": 0.01}))
    runs: Counter[str] = Counter()

    @app.task(queue="payments")
    async def charge(ctx: Context, order: str) -> None:
        runs[order] += 1

    @app.task(queue="mails")
    async def notify(ctx: Context) -> None:
        pass

    async with app, running_worker(app):
        gateway, namespace = app.producer.gateway, app.producer.namespace
        once = charge.options(task_id="charge-1", result_ttl=3600)
        await bounded((await once.enqueue("1")).result())
        await notify.enqueue()
        for queue in ("payments", "mails"):
            await set_partitions(gateway, namespace, queue, 4)

        async def retired() -> bool:
            return len(await queue_partitions(gateway, namespace, "mails")) == 4

        async def checked() -> object:
            return await gateway.command("HGET", namespace.partition("payments", 0).closed, "empty")

        await wait_until(checked, "the janitor has checked the partition of the payment")
        await wait_until(retired, "the janitor retires partitions")
        assert (await once.enqueue("1")).partition.index == 0
        await bounded((await charge.options(result_ttl=3600).enqueue("2")).result())
        assert len(await queue_partitions(gateway, namespace, "payments")) == 5
    assert runs == {"1": 1, "2": 1}
