"""Notices: the worker that ends a task tells the tasks that wait for it; what it leaves, another worker does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from perdure import App, Context, Retry, Worker
from perdure.queues import Gateway, Partition, State
from perdure.queues.delivery.settlement import Counters, WakeCondition, park, succeed
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.joins import (
    Delivered,
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    close_join,
    life_of,
    list_watchers,
    read_join,
    read_outcomes,
)
from perdure.worker.runtime.maintenance import notices
from perdure.worker.runtime.shared_settings import WorkerTimings

from tests.support.consumers import read_one, worker
from tests.support.workers import bounded, partition_of, running_worker, wait_until, work_off

CHILDREN = [f"c{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "timings", WorkerTimings(notice_interval=0.05))


@pytest.fixture
async def family(app: App) -> AsyncIterator[App]:
    """An app with a parent, which is woken when it is done, and children, of which some fail."""

    @app.task
    async def parent(ctx: Context) -> str:
        return "resumed"

    @app.task(queue="small", retry=Retry(max_attempts=1))
    async def child(ctx: Context, n: int) -> int:
        if n < 0:
            raise ValueError(n)
        return n * n

    async with app:
        yield app


async def spawn_and_park(
    app: App,
    numbers: list[int],
    *,
    limit: int = 0,
    on_failure: OnFailure = OnFailure.KEEP,
    wakes: WakeCondition = ("join", "g"),
) -> JoinPlace:
    """Play the part of a parent: spawn children, and park until they have ended."""
    gateway, partition = app.producer.gateway, partition_of(app)
    await app.producer.enqueue("parent", {}, task_id="p", queue=app.name)
    delivery = await read_one(await worker(gateway, partition))
    place, template = JoinPlace(partition, "p", "g"), EnvelopeTemplate("child", app=app.name)
    children = [
        PlannedChild("small", template.message(b'{"n":%d}' % number, task_id=f"c{position}"))
        for position, number in enumerate(numbers)
    ]
    how: dict[str, Any] = {"on_failure": on_failure, "limit": limit, "life": life_of(0, 0)}
    await add_children(gateway, delivery, place, children, **how)
    await park(gateway, delivery, "p", Counters(), delay=3600, waits="children", conditions=[wakes])
    return place


async def state_of(app: App, task_id: str) -> State:
    handle = await app.producer.find(task_id)
    assert handle is not None
    return await handle.status()


async def result_of(app: App, task_id: str) -> Any:
    handle = await app.producer.find(task_id)
    assert handle is not None
    return await bounded(handle.result())


async def test_a_parent_resumes_when_all_children_of_its_window_have_ended(family: App) -> None:
    place = await spawn_and_park(family, [*range(1, 40), -1], limit=5)
    async with running_worker(family, concurrency=3):
        assert await result_of(family, "p") == "resumed"
    await close(family, place)


async def close(app: App, place: JoinPlace) -> None:
    """Do what the worker of a parent does when its attempt ends."""
    state = await read_join(app.producer.gateway, place)
    assert state is not None
    assert state.over
    await close_join(app.producer.gateway, place, retention=60)


async def is_closed(app: App, place: JoinPlace) -> bool:
    return await read_join(app.producer.gateway, place) is None


async def test_a_burst_ends_when_the_parents_have_ended(family: App) -> None:
    place = await spawn_and_park(family, [1, 2, -3], limit=1)
    await work_off(family)
    assert await state_of(family, "p") is State.SUCCEEDED
    await close(family, place)


async def test_results_wait_in_the_join_until_the_parent_reads_them(family: App) -> None:
    place = await spawn_and_park(family, [3, -1, 5], wakes=("time", ""))
    await work_off(family)
    assert await state_of(family, "p") is State.WAITING
    found = [one async for one in read_outcomes(family.producer.gateway, place, ["c0", "c1", "c2"])]
    assert [one.result for one in found] == [b"9", None, b"25"]
    assert found[1].error["error"] == "ValueError"
    await (await handle_of(family, "p")).cancel()
    await work_off(family)
    await close(family, place)


async def handle_of(app: App, task_id: str) -> Any:
    handle = await app.producer.find(task_id)
    assert handle is not None
    return handle


async def test_another_worker_delivers_the_notice_of_a_worker_that_died(family: App) -> None:
    place = await spawn_and_park(family, [1])
    gateway, small = family.producer.gateway, partition_of(family, "small")
    dying = await worker(gateway, small, name="dying")
    delivery = await read_one(dying)
    assert await list_watchers(gateway, small, "c0") == [place]
    await succeed(gateway, delivery, "c0", b"7", Counters(1), ran=0.1, ttl=60)
    async with running_worker(family):
        assert await result_of(family, "p") == "resumed"
    await close(family, place)


async def test_children_of_a_parent_that_is_cancelled_are_cancelled(family: App) -> None:
    place = await spawn_and_park(family, list(range(3)))
    gateway, small = family.producer.gateway, partition_of(family, "small")
    other = await worker(gateway, small, name="other")
    running = [await read_one(other) for _ in range(2)]
    assert not (await (await handle_of(family, "p")).cancel()).terminal, "a worker cancels it, and its children"
    async with running_worker(family, queues=[family.name]):
        await wait_until(lambda: is_cancelled(family, "p"), "the parent is cancelled")
        await gateway.command("ZADD", place.partition.joins, "XX", 0, "p:g")  # the next look is due now
        await wait_until(lambda: is_closed(family, place), "the join is closed")
    assert await state_of(family, "c2") is State.CANCELLED
    for delivery in running:
        control = small.control(str(delivery.task_id))
        assert await gateway.command("HGET", control, "cancel") == b"1"
        await succeed(gateway, delivery, str(delivery.task_id), b"1", Counters(1), ran=0.1, ttl=60)
    await work_off(family)
    async with running_worker(family):
        await wait_until(lambda: is_empty(family), "the outbox is empty")


async def is_cancelled(app: App, task_id: str) -> bool:
    return await state_of(app, task_id) is State.CANCELLED


async def is_empty(app: App) -> bool:
    return not await app.producer.gateway.command("EXISTS", partition_of(app, "small").outbox)


async def test_a_plain_task_leaves_no_notice(family: App) -> None:
    await family.producer.enqueue("child", {"n": 3}, task_id="alone", queue="small")
    await work_off(family)
    assert await result_of(family, "alone") == 9
    assert await is_empty(family)


async def test_a_delivery_that_waits_holds_up_no_other(family: App, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    delivered: list[str] = []
    server_is_away = asyncio.Event()

    async def deliver(gateway: Gateway, tasks: Sequence[tuple[Partition, str]]) -> Delivered:
        taken.extend(task_id for _, task_id in tasks)
        if any(task_id == "slow" for _, task_id in tasks):
            await server_is_away.wait()
        delivered.extend(task_id for _, task_id in tasks)
        return Delivered(len(tasks), [])

    monkeypatch.setattr(notices, "deliver_notices", deliver)
    small = partition_of(family, "small")

    async def give(task_id: str, found: list[str]) -> None:
        known = found.count(task_id)
        delivery.give(small, task_id)
        await wait_until(lambda: has(task_id, found, known), f"a notice of {task_id}")

    async def has(task_id: str, found: list[str], known: int) -> bool:
        return found.count(task_id) > known

    async with Worker(family) as host:
        delivery = host._notices
        running = asyncio.create_task(delivery.run())
        for number in range(8):  # each of the deliverers was idle in between
            await give(f"before{number}", delivered)
        for number in range(3):
            await give("slow", taken)
            await give(f"after{number}", delivered)
        server_is_away.set()
        await delivery.drain()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert delivered.count("slow") == 3
