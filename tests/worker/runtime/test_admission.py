"""Limited tasks with real workers: what starts when, and what becomes of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import App, Context, Retry, TaskCancelled, Unique
from perdure.queues import State, TaskHandle
from perdure.queues.explanation import explain_task
from perdure.testing import run_until_idle
from perdure.worker.durable.waiting import WaitBoard

from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


async def test_a_burst_runs_tasks_that_wait_for_each_other(app: App) -> None:
    pool = app.limit("pool", running=1, by="key")
    running: list[str] = []
    most = 0

    @app.task(limits=[pool])
    async def call(_ctx: Context, key: str) -> None:
        nonlocal most
        running.append(key)
        most = max(most, running.count(key))
        await asyncio.sleep(0.01)
        running.remove(key)

    async with app:
        await call.enqueue_many([{"key": key} for key in "aaabbb"])
        assert await run_until_idle(app) == {"succeeded": 6}
    assert most == 1


async def test_a_task_that_is_not_to_wait_is_cancelled_with_the_reason(app: App) -> None:
    pool = app.limit("pool", total=1, over="drop")

    @app.task(limits=[pool])
    async def call(_ctx: Context, key: str) -> str:
        await asyncio.sleep(0.2)
        return key

    async with app:
        handles = await call.enqueue_many([{"key": key} for key in "abc"])
        await run_until_idle(app)
        assert await handles[0].result() == "a"
        for handle in handles[1:]:
            with pytest.raises(TaskCancelled, match="limit pool had no room for it") as caught:
                await handle.result()
            assert caught.value.dropped == "pool"


async def test_a_newer_task_replaces_those_that_wait_for_its_key(app: App) -> None:
    pool = app.limit("pool", running=1, by="key", over="replace")

    @app.task(limits=[pool])
    async def call(_ctx: Context, key: str, number: int) -> int:
        return number

    async with app:
        first, second = await call.enqueue_many([{"key": "a", "number": 1}, {"key": "a", "number": 2}])
        other = await call.enqueue("b", 3)
        await run_until_idle(app)
        assert await second.result() == 2
        assert await other.result() == 3
        with pytest.raises(TaskCancelled) as caught:
            await first.result()
        assert caught.value.replaced_by == second.id


@pytest.mark.parametrize("how", ["retry", "sleep"])
async def test_a_task_that_waits_for_itself_keeps_its_place_in_the_order(
    app: App, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)
    line = app.limit("line", running=1, by="key", ordered=True)
    started: list[int] = []

    @app.task(limits=[line], retry=Retry(max_attempts=3, base=0.05))
    async def call(ctx: Context, key: str, number: int) -> None:
        started.append(number)
        if number == 1 and how == "retry" and ctx.attempt == 1:
            raise ValueError("once more")
        if number == 1 and how == "sleep":
            await ctx.sleep(0.3)

    async with app:
        await call.enqueue_many([{"key": "a", "number": number} for number in (1, 2, 3)])
        await run_until_idle(app, wait_due=True, timeout=20)
    assert started == [1, 1, 2, 3]


async def test_a_dead_letter_lets_the_next_one_of_the_order_go(app: App) -> None:
    line = app.limit("line", running=1, by="key", ordered=True)
    started: list[int] = []

    @app.task(limits=[line], retry=Retry(max_attempts=1))
    async def call(_ctx: Context, key: str, number: int) -> None:
        started.append(number)
        if number == 1:
            raise ValueError("no")

    async with app:
        await call.enqueue_many([{"key": "a", "number": number} for number in (1, 2)])
        await run_until_idle(app, allow_failures=True)
    assert started == [1, 2]


async def test_children_wait_for_limits(app: App) -> None:
    pool = app.limit("pool", total=2)
    running = most = 0

    @app.task(limits=[pool])
    async def child(_ctx: Context, number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        return await ctx.gather(child, [{"number": number} for number in range(6)])

    async with app:
        handle = await parent.enqueue()
        await run_until_idle(app, wait_due=True, timeout=20)
        assert await handle.result() == list(range(6))
    assert most <= 2


async def test_a_waiting_task_can_be_cancelled(app: App) -> None:
    pool = app.limit("pool", total=1)

    @app.task(limits=[pool])
    async def call(_ctx: Context) -> None:
        pass

    async with app:
        handle = await call.enqueue()
        assert await handle.status() is State.LIMITED
        assert await handle.cancel() is State.CANCELLED
        assert await run_until_idle(app) == {}


async def test_a_unique_task_waits_for_its_limits(app: App) -> None:
    pool = app.limit("pool", total=1)

    @app.task(limits=[pool], unique=Unique("while_queued", by="key"))
    async def call(_ctx: Context, key: str) -> str:
        return key

    async with app:
        one, same = await call.enqueue("a"), await call.enqueue("a")
        assert same.id == one.id
        assert await one.status() is State.LIMITED
        await run_until_idle(app)
        assert await one.result() == "a"


async def test_a_task_with_large_arguments_waits_for_its_limits(app: App) -> None:
    pool = app.limit("pool", total=1)

    @app.task(limits=[pool])
    async def call(_ctx: Context, text: str) -> int:
        return len(text)

    async with app:
        handle = await call.enqueue("x" * 3_000_000)
        assert await handle.status() is State.LIMITED
        await run_until_idle(app)
        assert await handle.result() == 3_000_000


async def test_a_delayed_task_waits_for_its_limits_when_it_is_due(app: App) -> None:
    pool = app.limit("pool", total=1)

    @app.task(limits=[pool])
    async def call(_ctx: Context) -> int:
        return 1

    async with app:
        handles = [await call.options(delay=0.1).enqueue() for _ in range(3)]
        assert await handles[0].status() is State.SCHEDULED
        await run_until_idle(app, wait_due=True)
        assert [await handle.result() for handle in handles] == [1, 1, 1]


async def test_a_task_of_a_rate_waits_for_its_time(app: App) -> None:
    slow = app.limit("slow", rate="10/s", burst=1)

    @app.task(limits=[slow])
    async def call(_ctx: Context) -> int:
        return 1

    async with app:
        handles = await call.enqueue_many([{}, {}, {}])
        await run_until_idle(app, wait_due=True)
        assert [await handle.result() for handle in handles] == [1, 1, 1]


async def runs(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.RUNNING


async def test_task_why_names_the_limit_and_what_holds_it(app: App) -> None:
    pool = app.limit("pool", running=2, by="tenant")

    @app.task(limits=[pool])
    async def call(_ctx: Context, tenant: str) -> None:
        await asyncio.sleep(60)

    async with app:
        handles = await call.enqueue_many([{"tenant": "t1"}] * 4)
        async with running_worker(app):
            await wait_until(lambda: runs(handles[1]), "the second task runs")
            said = await explain_task(app.producer.gateway, handles[3].partition, handles[3].id)
        assert said is not None
        assert "it waits for limit pool: 2 of 2 running for its tenant" in said.sentence
        assert ", 1 before it" in said.sentence
        assert said.cause == "limit"
