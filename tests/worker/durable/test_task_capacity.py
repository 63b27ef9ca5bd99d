"""`ctx.capacity()`: what a task has left, and what a model reads about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import App, Context, SyncContext, Unavailable
from perdure.testing import make_context
from perdure.worker.agents.context.builder import ContextBuilder
from perdure.worker.agents.context.prompt import Prompt
from perdure.worker.agents.journal.state import AgentState
from perdure.worker.durable.task_capacity import TaskCapacity

from tests.support.workers import BOUND, bounded, running_worker, work_off


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_handler_reads_its_time_its_queue_and_its_worker(app: App) -> None:
    found: list[TaskCapacity] = []
    begun, end = asyncio.Event(), asyncio.Event()

    @app.task(timeout=100)
    async def work(ctx: Context) -> None:
        begun.set()
        await end.wait()
        found.append(await ctx.capacity())

    @app.task
    async def waits(ctx: Context) -> None: ...

    await work.enqueue()
    async with running_worker(app, concurrency=1):
        await bounded(begun.wait())
        handles = await waits.enqueue_many([{}] * 3)
        end.set()
        for handle in handles:
            await handle.result(timeout=BOUND)
    (capacity,) = found
    assert 0 < capacity.time_left < 100
    assert capacity.time_limit == 100
    assert (capacity.queued, capacity.free) == (3, 0.0)
    assert (capacity.context_left, capacity.context_window) == (None, None)


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_without_a_limit_of_its_own_a_task_has_that_of_the_worker(app: App) -> None:
    found: list[TaskCapacity] = []

    @app.task
    async def work(ctx: Context) -> None:
        found.append(await ctx.capacity())

    @app.task
    def in_a_thread(ctx: SyncContext) -> None:
        found.append(ctx.capacity())

    await work.enqueue()
    await in_a_thread.options(timeout=50).enqueue()
    await work_off(app)
    assert sorted(capacity.time_limit for capacity in found) == [50, app.settings.time_limit]
    assert all(0 < capacity.free < 1 and capacity.queued == 0 for capacity in found)


async def test_a_handler_under_test_has_all_the_capacity() -> None:
    capacity = await make_context().capacity()
    assert (capacity.queued, capacity.free) == (0, 1.0)
    assert capacity.time_left > 0


def capacity_of(**changed: Any) -> TaskCapacity:
    given: dict[str, Any] = {
        "time_left": 90.0,
        "time_limit": 100.0,
        "context_left": None,
        "context_window": None,
        "queued": 0,
        "free": 1.0,
    }
    return TaskCapacity(**given | changed)


@pytest.mark.parametrize(
    ("changed", "sentences"),
    [
        ({}, []),
        ({"time_left": 20.0}, ["Time left: 20 s."]),
        ({"time_left": 700.0, "time_limit": 3600.0}, ["Time left: 12 min."]),
        ({"time_left": -3.0}, ["Time left: 0 s."]),
        ({"context_left": 30_000, "context_window": 100_000}, []),
        ({"context_left": 20_000, "context_window": 100_000}, ["Context window left: 20,000 of 100,000 tokens."]),
        ({"queued": 7}, []),
        ({"queued": 7, "free": 0.0}, ["Waiting in the queue, with no free worker slot: 7 tasks."]),
    ],
)
def test_a_model_reads_what_is_scarce(changed: dict[str, Any], sentences: list[str]) -> None:
    assert capacity_of(**changed).sentences() == sentences


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_the_brief_says_what_is_scarce(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Prompt] = []
    found: list[TaskCapacity] = []
    builder = ContextBuilder(window=4000, memory=False)

    async def model(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "yes"

    @app.task(timeout=3600)
    async def ask(ctx: Context, left: float) -> None:
        ctx._run.started -= 3600 - left
        state = AgentState(goal="Fix the report")
        await builder.ask(ctx, state, model)
        found.append(await ctx.capacity())

    await ask.enqueue(3000)
    await ask.enqueue(240)
    await work_off(app, concurrency=1)
    texts = ["\n".join(message.content for message in prompt.messages) for prompt in prompts]
    assert "Time left" not in texts[0]
    assert "# Brief\n\nTime left: 4 min." in texts[1]
    for prompt, capacity in zip(prompts, found, strict=True):
        assert capacity.context_window == 4000
        assert capacity.context_left == 3400 - prompt.wanted


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_prompt_is_built_while_redis_is_away(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable(ctx: Context) -> TaskCapacity:
        raise Unavailable("Redis does not answer")

    monkeypatch.setattr(Context, "capacity", unavailable)
    prompts: list[Prompt] = []

    @app.task
    async def ask(ctx: Context) -> None:
        prompts.append(await ContextBuilder(window=4000, memory=False).build(ctx, AgentState(goal="Fix it")))

    await ask.enqueue()
    await work_off(app)
    assert len(prompts) == 1
