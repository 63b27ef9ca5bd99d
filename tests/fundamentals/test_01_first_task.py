"""First task: register a function, enqueue it, run a worker, wait for the result."""

from __future__ import annotations

import pytest
from perdure import App, Context, InvalidArguments, State, TaskExists, Worker

pytestmark = pytest.mark.integration


async def test_a_worker_runs_a_task_and_the_caller_gets_its_result(app: App) -> None:
    """A task is an async function whose first parameter is the context. `enqueue` stores it and returns a handle."""

    @app.task
    async def greet(ctx: Context, name: str) -> str:
        return f"Hello, {name}!"

    async with app:
        handle = await greet.enqueue("Ada")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "Hello, Ada!"
        assert await handle.status() is State.SUCCEEDED


async def test_a_task_is_stored_before_any_worker_runs(app: App) -> None:
    """Once `enqueue` returns, the task is in Redis. It waits in its queue until a worker reads it."""

    @app.task
    async def greet(ctx: Context, name: str) -> str:
        return f"Hello, {name}!"

    async with app:
        handle = await greet.enqueue("Ada")
        assert await handle.status() is State.QUEUED
        with pytest.raises(TimeoutError):
            await handle.result(timeout=0)


async def test_arguments_are_checked_by_the_annotations_of_the_function(app: App) -> None:
    """Arguments that do not fit raise `InvalidArguments` in the caller, and nothing is stored."""

    @app.task
    async def double(ctx: Context, number: int) -> int:
        return 2 * number

    async with app:
        with pytest.raises(InvalidArguments, match="number"):
            await double.enqueue("many")  # type: ignore[arg-type]  # a type checker finds it as well


async def test_an_id_chosen_by_the_caller_makes_enqueue_idempotent(app: App) -> None:
    """Enqueued twice under one `task_id`, the task runs once. So a caller may repeat a call that got no answer.

    With other arguments, the same id is a mistake: `TaskExists`.
    """
    runs = []

    @app.task
    async def invoice(ctx: Context, order: str) -> None:
        runs.append(order)

    async with app:
        first = await invoice.options(task_id="invoice-A17").enqueue("A17")
        second = await invoice.options(task_id="invoice-A17").enqueue("A17")
        with pytest.raises(TaskExists, match=r"other arguments \(order\)"):
            await invoice.options(task_id="invoice-A17").enqueue("A18")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert first.id == second.id == "invoice-A17"
        assert runs == ["A17"]
