"""The context of the running task, found from anywhere in it, and steps that are called within steps."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.from_thread
import pytest
from perdure import App, Context, Middleware, Retry, Settings, StepCall, current_context, current_step
from perdure.worker.errors import StepOutsideTask
from perdure.worker.middleware import CallNext

from tests.support.runs import current_run
from tests.support.workers import bounded, history, recorded_steps, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("nested")]

AGAIN = Retry(max_attempts=2, base=0.0)


class Seen(Middleware):
    """Notes the keys of the steps that the hooks see."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        self.keys.append(step.key)
        return await call_next()


@pytest.fixture
def seen() -> Seen:
    return Seen()


# the context


async def test_the_context_is_found_in_the_whole_run(app: App) -> None:
    async def call_a_step() -> str:
        return await current_context().step("id", lambda: current_context().task_id)

    def in_a_thread() -> str:
        return anyio.from_thread.run(call_a_step)

    @app.task
    async def job(ctx: Context) -> list[str]:
        assert current_context() is ctx
        return [
            await call_a_step(),
            await asyncio.create_task(call_a_step()),
            await ctx.step("inside", call_a_step),
            await ctx.step("thread", in_a_thread),
        ]

    handles = [await job.enqueue() for _ in range(3)]
    await work_off(app)
    for handle in handles:
        assert await bounded(handle.result()) == [handle.id] * 4


async def test_there_is_no_context_outside_of_a_task_and_after_it(app: App) -> None:
    with pytest.raises(StepOutsideTask, match="no task is running here"):
        current_context()
    ended = asyncio.Event()
    left: list[asyncio.Task[Context]] = []

    async def straggler() -> Context:
        await ended.wait()
        return current_context()

    @app.task
    async def job(ctx: Context) -> None:
        left.append(asyncio.create_task(straggler()))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    ended.set()
    with pytest.raises(StepOutsideTask, match="no task is running here"):
        await bounded(left[0])


# steps within steps


async def test_a_step_within_a_step_is_a_part_of_it(settings: Settings, seen: Seen) -> None:
    tries: list[str] = []

    async def fetch(url: str) -> str:
        tries.append(url)
        if len(tries) == 1:
            raise ConnectionError
        return f"{url} for {current_step().key}"

    async def crawl(ctx: Context) -> list[str]:
        once = ctx.options(retry=AGAIN)
        return [await once.step("fetch", fetch, "a"), await ctx.tool("fetch", fetch, "b")]

    async with App("nested", settings=settings, middleware=[seen]) as app:

        @app.task
        async def job(ctx: Context) -> list[str]:
            return await ctx.step("crawl", crawl, ctx)

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["a for crawl", "b for crawl"]
        assert list(await recorded_steps(app, handle)) == ["d:crawl"]
        assert [event.type for event in await history(handle)].count("step_failed") == 0
    assert tries == ["a", "a", "b"]
    assert seen.keys == ["crawl"]


async def test_the_timeout_of_a_step_within_a_step_counts(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        async def outer() -> str:
            try:
                await ctx.options(timeout=0.01).step("wait", asyncio.Event().wait)
            except TimeoutError as error:
                return str(error)
            return "it ended"

        return await ctx.step("outer", outer)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "step 'outer' ran longer than 0.01 s"


@pytest.mark.parametrize("by", ["the outer step", "the inner step"])
@pytest.mark.parametrize("again", ["the outer step is retried", "the task is retried"])
async def test_recorded_steps_within_a_step_do_not_run_again(
    settings: Settings, seen: Seen, by: str, again: str
) -> None:
    calls: list[str] = []
    stored: list[set[str]] = []

    async with App("nested", settings=settings, middleware=[seen]) as app:

        async def fetch(url: str) -> str:
            calls.append(url)
            return f"{url} for {current_step().key}"

        async def crawl(ctx: Context) -> list[str]:
            inner = ctx if by == "the outer step" else ctx.options(nested="record")
            with ctx.scope("pages"):
                found = [await inner.step("fetch", fetch, "a"), await inner.step("fetch", fetch, "b")]
            handle = await app.producer.find(ctx.task_id)
            assert handle is not None
            stored.append(set(await recorded_steps(app, handle)))
            if len(stored) == 1:
                raise ConnectionError
            return found

        @app.task(retry=AGAIN)
        async def job(ctx: Context) -> list[str]:
            with ctx.scope("site"):
                outer = ctx.options(
                    nested="record" if by == "the outer step" else "run",
                    retry=AGAIN if again == "the outer step is retried" else None,
                )
                return await outer.step("crawl", crawl, ctx)

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["a for site/crawl/pages/fetch", "b for site/crawl/pages/fetch#2"]
        steps = {name for name in await recorded_steps(app, handle) if name.startswith("d:")}
    assert calls == ["a", "b"]
    assert {"d:site/crawl/pages/fetch", "d:site/crawl/pages/fetch#2"} <= stored[0]
    assert steps == {"d:site/crawl"}
    assert seen.keys[:3] == ["site/crawl", "site/crawl/pages/fetch", "site/crawl/pages/fetch#2"]


async def test_a_risky_step_within_a_step_is_recorded(app: App) -> None:
    paid: list[str] = []

    async def pay(order: str) -> str:
        paid.append(order)
        return f"receipt for {order} under {current_step().idempotency_key}"

    async def check_out(ctx: Context) -> str:
        receipt = await ctx.options(risky=True).step("pay", pay, "7")
        if current_step().attempt == 1:
            raise ConnectionError
        return receipt

    @app.task
    async def job(ctx: Context) -> str:
        return await ctx.options(retry=AGAIN).step("check out", check_out, ctx)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == f"receipt for 7 under {handle.id}:check out/pay"
    assert paid == ["7"]


async def test_a_stopping_worker_waits_for_a_recorded_step_within_a_step(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        async def outer() -> str:
            current_run(ctx).request_stop()
            return await ctx.options(nested="record").step("inner", "a".upper)

        return await ctx.step("outer", outer)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "A"
