"""Options of a call: a delay, a queue, a key for order, and many tasks at once."""

from __future__ import annotations

import asyncio

import pytest
from perdure import App, Context, State, Worker

pytestmark = pytest.mark.integration


async def test_a_delayed_task_is_scheduled_and_runs_when_it_is_due(app: App) -> None:
    """`options` returns the task with options for one call."""

    @app.task
    async def remind(ctx: Context, text: str) -> str:
        return text

    async with app:
        tomorrow = await remind.options(delay=86_400).enqueue("tomorrow")
        soon = await remind.options(delay=0.05).enqueue("soon")
        assert await tomorrow.status() is State.SCHEDULED
        async with Worker(app) as worker, asyncio.TaskGroup() as group:
            group.create_task(worker.run())  # without burst, a worker runs until it is stopped
            assert await soon.result(timeout=10) == "soon"
            worker.stop()
        assert await tomorrow.status() is State.SCHEDULED


async def test_a_worker_reads_the_queues_that_it_is_given(app: App) -> None:
    """A task has a default queue. Give the worker `queues`, else it reads all queues of the app's tasks."""

    @app.task(queue="mail")
    async def send(ctx: Context, to: str) -> str:
        return to

    async with app:
        normal, urgent = await send.enqueue("ada"), await send.options(queue="urgent").enqueue("grace")
        async with Worker(app, queues=["urgent"]) as worker:
            await worker.run(burst=True)
        assert await urgent.status() is State.SUCCEEDED
        assert await normal.status() is State.QUEUED


async def test_enqueue_many_stores_one_task_per_set_of_arguments(app: App) -> None:
    """All sets of arguments are checked first, and then stored in few round trips."""

    @app.task
    async def square(ctx: Context, number: int) -> int:
        return number**2

    async with app:
        handles = await square.enqueue_many({"number": number} for number in range(100))
        async with Worker(app, concurrency=32) as worker:
            await worker.run(burst=True)
        assert [await handle.result(timeout=10) for handle in handles] == [number**2 for number in range(100)]


async def test_tasks_of_one_key_start_in_the_order_of_enqueuing(app: App) -> None:
    """The key selects the partition of the queue; with one slot, a worker runs the tasks of a partition in turn."""
    applied = []

    @app.task
    async def apply(ctx: Context, account: str, change: int) -> None:
        applied.append(change)

    async with app:
        changes = [{"account": "ada", "change": number} for number in range(10)]
        await apply.options(key=lambda arguments: arguments["account"]).enqueue_many(changes)
        async with Worker(app, concurrency=1) as worker:
            await worker.run(burst=True)
    assert applied == list(range(10))
