"""`max_depth` of tasks and queues: declaration, calls from code, threads and handlers, and producers by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    InvalidArguments,
    PlanStep,
    Producer,
    Retry,
    SpawnRefused,
    State,
    SyncContext,
)
from perdure.queues import QueueFull
from perdure.queues.catalog import CatalogTask, read_catalog
from perdure.queues.depth import MaxDepth
from perdure.queues.errors import CatalogError
from perdure.worker.errors import TaskDefinitionError

from tests.support.workers import BOUND, bounded, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration


async def is_published(producer: Producer) -> bool:
    return bool((await read_catalog(producer.gateway, producer.namespace)).tasks)


WRONG: Any = [
    ({"max_depth": 0}, r"max_depth must be 1 to 1e\+12 tasks, got 0"),
    ({"max_depth": -1}, "got -1"),
    ({"max_depth": 2.5}, "max_depth must be a whole number, got 2.5"),
    ({"max_depth": True}, "max_depth must be a whole number, got True"),
    ({"max_depth": "9"}, "max_depth must be a whole number, got '9'"),
    ({"when_full": "wait"}, "when_full and wait_limit must go with max_depth, got no max_depth"),
    ({"wait_limit": 5}, "when_full and wait_limit must go with max_depth, got no max_depth"),
    ({"max_depth": 9, "when_full": "drop"}, "when_full must be 'refuse' or 'wait', got 'drop'"),
    ({"max_depth": 9, "wait_limit": 5}, "wait_limit must go with when_full='wait'"),
    ({"max_depth": 9, "when_full": "refuse", "wait_limit": 5}, "wait_limit must go with when_full='wait'"),
    ({"max_depth": 9, "when_full": "wait", "wait_limit": 0}, "wait_limit must be more than 0 seconds"),
    ({"max_depth": 9, "when_full": "wait", "wait_limit": True}, "wait_limit must be seconds or a timedelta, got True"),
    ({"max_depth": 9, "when_full": "wait", "wait_limit": "5s"}, "wait_limit must be seconds or a timedelta, got '5s'"),
]


@pytest.mark.parametrize(("given", "problem"), WRONG)
def test_a_limit_is_checked_where_it_is_declared(given: Mapping[str, Any], problem: str) -> None:
    app = App("shop")

    async def pay(ctx: Context, order: int) -> None: ...

    with pytest.raises(TaskDefinitionError, match=f"task 'pay': .*{problem}"):
        app.task(**given)(pay)
    task = app.task(pay)
    with pytest.raises(InvalidArguments, match=problem):
        task.options(**given)
    if "max_depth" in given:
        with pytest.raises(TaskDefinitionError, match=f"queue 'bulk': .*{problem}"):
            app.queue("bulk", **given)


@pytest.mark.parametrize(("given", "problem"), WRONG)
@pytest.mark.app("shop")
async def test_a_limit_of_a_producer_is_checked_before_anything_is_sent(
    app: App, given: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        await app.producer.enqueue("pay", {}, queue="bulk", task_id="x", **given)
    assert await app.producer.find("x") is None


def test_options_of_a_call_complete_those_of_the_task_and_of_the_queue() -> None:
    app = App("shop")
    bulk = app.queue("bulk", max_depth=7, when_full="wait", wait_limit=timedelta(minutes=2))

    @app.task(max_depth=5)
    async def pay(ctx: Context) -> None: ...

    @app.task(queue=bulk)
    async def ship(ctx: Context) -> None: ...

    assert (pay.limit_on("shop"), ship.limit_on(bulk)) == (MaxDepth(5), MaxDepth(7, 120.0))
    assert pay.options(when_full="wait").max_depth == MaxDepth(5, 60.0)
    assert ship.options(max_depth=9).max_depth == MaxDepth(9, 120.0)
    assert ship.options(when_full="refuse").max_depth == MaxDepth(7)
    assert ship.options(max_depth=False).max_depth is False
    assert ship.options(queue="fast").max_depth is None
    with pytest.raises(InvalidArguments, match="got no max_depth"):
        ship.options(queue="fast", when_full="wait")


@pytest.mark.app("shop")
async def test_a_queue_limits_all_tasks_that_go_there(app: App) -> None:
    bulk = app.queue("bulk", max_depth=2)

    @app.task
    async def pay(ctx: Context) -> None: ...

    @app.task(queue=bulk)
    async def ship(ctx: Context) -> None: ...

    await ship.enqueue()
    await pay.options(queue="bulk").enqueue()
    for call in (ship.options(), pay.options(queue="bulk")):
        with pytest.raises(QueueFull, match="queue 'bulk' is full: 2 tasks wait, and max_depth is 2"):
            await call.enqueue()
    await pay.enqueue()
    await ship.options(max_depth=False).enqueue()


@pytest.mark.app("shop")
async def test_many_tasks_and_streams_obey(app: App) -> None:
    @app.task(max_depth=3)
    async def pay(ctx: Context, order: int) -> int:
        return order

    with pytest.raises(QueueFull, match="3 tasks of the call were stored, 2 were not") as raised:
        await pay.enqueue_many([{"order": order} for order in range(5)])
    assert len(raised.value.stored) == 3
    with pytest.raises(QueueFull):
        _ = [handle async for handle in pay.enqueue_stream([{"order": 9}])]
    async with running_worker(app):
        waiting = pay.options(when_full="wait", wait_limit=BOUND)
        handles = await bounded(waiting.enqueue_many([{"order": order} for order in range(20)]))
        assert [await handle.result(timeout=BOUND) for handle in handles] == list(range(20))


def test_threads_obey(app: App) -> None:
    @app.task(max_depth=1)
    async def pay(ctx: Context, order: int) -> int:
        return order

    with app.sync() as producer:
        pay.enqueue_sync(1)
        with pytest.raises(QueueFull):
            pay.enqueue_sync(2)
        with pytest.raises(QueueFull):
            pay.enqueue_many_sync([{"order": 3}])
        with pytest.raises(QueueFull, match="max_depth is 1"):
            producer.enqueue("pay", {"order": 4}, queue=pay.queue, max_depth=1)
        with pytest.raises(QueueFull, match="is full after"):
            producer.enqueue_many(
                "pay", [{"order": 4}], queue=pay.queue, max_depth=1, when_full="wait", wait_limit=0.02
            )


@pytest.mark.app("shop")
async def test_a_handler_waits_for_another_queue_and_not_for_its_own(app: App) -> None:
    """The worker serves the queue of the handler; waiting for room there, it would wait for itself."""

    @app.task(queue="slow", max_depth=1, when_full="wait", wait_limit=0.05)
    async def slow(ctx: Context) -> None: ...

    @app.task(max_depth=1, when_full="wait", wait_limit=BOUND)
    async def crawl(ctx: Context, depth: int) -> int:
        if depth:
            await crawl.enqueue_many([{"depth": depth - 1}] * 3)
        return depth

    @app.task(retry=Retry(max_attempts=1))
    async def asks(ctx: Context) -> int:
        await slow.enqueue()
        try:
            await slow.enqueue()
        except QueueFull as error:
            return error.depth
        return 0

    @app.task
    def asks_in_a_thread(ctx: SyncContext) -> int:
        try:
            slow.enqueue_sync()
        except QueueFull as error:
            return error.depth
        return 0

    async with running_worker(app, concurrency=1, queues=["shop"]):
        assert await (await crawl.enqueue(2)).result(timeout=BOUND) == 2
        assert await (await asks.options(max_depth=False).enqueue()).result(timeout=BOUND) == 1
        assert await (await asks_in_a_thread.enqueue()).result(timeout=BOUND) == 1


@pytest.mark.app("shop")
async def test_a_handler_is_refused_and_may_try_again(app: App) -> None:
    runs: list[int] = []

    @app.task(queue="slow", max_depth=1)
    async def slow(ctx: Context) -> None: ...

    @app.task(retry=Retry(max_attempts=3, base=0.001))
    async def asks(ctx: Context) -> str:
        runs.append(ctx.attempt)
        if len(runs) == 2:
            await work_off(app, queues=["slow"])
        return (await slow.enqueue()).id

    await slow.enqueue()
    handle = await asks.enqueue()
    await work_off(app, queues=["shop"])
    assert await handle.result(timeout=BOUND)
    assert runs == [1, 2]


@pytest.mark.app("shop")
async def test_children_and_groups_do_not_obey(app: App) -> None:
    @app.task(max_depth=1)
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task(max_depth=1)
    async def total(ctx: Context, numbers: list[int]) -> int:
        return sum(numbers)

    @app.task
    async def parent(ctx: Context) -> list[int]:
        return await ctx.gather(child, range(5))

    first, group = await parent.enqueue(), await child.enqueue_group(range(5), then=total)
    await work_off(app)
    assert await first.result(timeout=BOUND) == [0, 1, 2, 3, 4]
    assert await group.result(timeout=BOUND) == 10
    with pytest.raises(ValueError, match="the tasks of a group cannot have the option max_depth"):
        await child.options(max_depth=4).enqueue_group(range(5), then=total)

    @app.task(retry=Retry(max_attempts=1))
    async def refused(ctx: Context) -> str:
        try:
            await ctx.spawn(child.options(max_depth=4), 1)
        except SpawnRefused as error:
            return str(error)
        return ""

    handle = await refused.enqueue()
    await work_off(app)
    assert "a child cannot have the option max_depth" in await handle.result(timeout=BOUND)


@pytest.mark.app("shop")
async def test_retries_and_wakes_are_never_refused(app: App) -> None:
    @app.task(max_depth=1, retry=Retry(max_attempts=2, base=0.001))
    async def fails_once(ctx: Context) -> int:
        if ctx.attempt == 1:
            await fails_once.options(max_depth=False).enqueue()  # the queue is deeper than the limit
            raise ValueError
        return ctx.attempt

    handle = await fails_once.enqueue()
    async with running_worker(app, concurrency=2):
        assert await handle.result(timeout=BOUND) == 2


@pytest.mark.app("shop")
async def test_an_agent_obeys_and_its_known_goal_needs_no_room(app: App) -> None:
    class Research(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None: ...

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return state.goal

    research = app.agent(Research, max_depth=1, slots=2)
    assert research.task.slots == 2
    first = await research.enqueue("one")
    with pytest.raises(QueueFull):
        await research.enqueue("two")
    assert (await research.enqueue("one")).id == first.id


@pytest.mark.app("shop")
async def test_producers_by_name_find_the_limit_in_the_catalog(app: App) -> None:
    app.queue("bulk", max_depth=2)

    @app.task(queue="bulk")
    async def ship(ctx: Context) -> None: ...

    async with running_worker(app, queues=["unused"]):
        producer: Producer = app.producer
        await wait_until(partial(is_published, producer), "the worker publishes its tasks")
        await producer.enqueue("ship")
        assert (await producer.catalog()).find("ship").max_depth() == MaxDepth(2)
        with pytest.raises(QueueFull) as raised:
            await producer.enqueue_many("ship", [{}] * 3)
        assert len(raised.value.stored) == 1
        with pytest.raises(QueueFull, match=r"is full after 0\.02 s"):
            await producer.enqueue("ship", when_full="wait", wait_limit=0.02)
        handle = await producer.enqueue("ship", max_depth=False)
        assert (await handle.record()).state is State.QUEUED


def test_a_damaged_limit_of_the_catalog_is_one_sentence() -> None:
    for depth in ({"max_depth": "x", "wait_limit": 0}, {}, {"max_depth": 1, "wait_limit": -3}, [1]):
        with pytest.raises(CatalogError, match="could not read the max_depth of task 'ship'"):
            CatalogTask("ship", "bulk", depth=depth).max_depth()  # type: ignore[arg-type]


@pytest.mark.app("shop")
async def test_a_cancelled_wait_stores_nothing(app: App) -> None:
    @app.task(max_depth=1, when_full="wait")
    async def pay(ctx: Context, order: int) -> None: ...

    await pay.enqueue(1)
    waiting = asyncio.create_task(pay.options(task_id="second").enqueue(2))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await work_off(app)
    assert await app.producer.find("second") is None


@pytest.mark.app("shop")
async def test_tasks_in_the_waiting_lists_of_limits_count(app: App) -> None:
    tenant = app.limit("tenant", running=1, by="name")

    @app.task(limits=[tenant], max_depth=4)
    async def work(ctx: Context, name: str) -> str:
        return name

    @app.task
    async def other(ctx: Context) -> None: ...

    handles = [await work.enqueue(name) for name in ("a", "a", "b", "c")]
    assert [(await handle.status()).value for handle in handles] == [State.LIMITED] * 4
    with pytest.raises(QueueFull, match="4 tasks wait"):
        await work.enqueue("d")
    with pytest.raises(QueueFull, match="4 tasks wait"):
        await work.options(delay=60).enqueue("d")
    with pytest.raises(QueueFull, match="4 tasks wait"):
        await other.options(max_depth=4).enqueue()
    with pytest.raises(QueueFull, match="1 task of the call was stored, 2 were not"):
        await work.options(max_depth=5).enqueue_many([{"name": name} for name in "def"])
    async with running_worker(app):
        assert [await handle.result(timeout=BOUND) for handle in handles] == ["a", "a", "b", "c"]


@pytest.mark.app("shop")
async def test_each_priority_has_a_depth_of_its_own(app: App) -> None:
    app.queue(max_depth=2)

    @app.task(priority="low")
    async def bulk(ctx: Context, order: int) -> int:
        return order

    @app.task
    async def urgent(ctx: Context) -> None: ...

    with pytest.raises(QueueFull, match="2 tasks wait") as raised:
        await bulk.enqueue_many([{"order": order} for order in range(5)])
    assert len(raised.value.stored) == 2
    await urgent.enqueue()
    await urgent.options(priority="high").enqueue()
    await urgent.enqueue()
    with pytest.raises(QueueFull, match="2 tasks wait"):
        await urgent.enqueue()
    async with running_worker(app):
        waiting = bulk.options(when_full="wait", wait_limit=BOUND)
        handles = await bounded(waiting.enqueue_many([{"order": order} for order in range(8)]))
        assert [await handle.result(timeout=BOUND) for handle in handles] == list(range(8))
