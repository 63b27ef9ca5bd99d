"""Middleware and lifespan: code around every task, and resources that a worker process opens once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from perdure import App, Context, Middleware, Settings, StepCall, Worker

pytestmark = pytest.mark.integration


async def test_a_middleware_is_called_around_each_run_and_each_step(settings: Settings) -> None:
    """Override the hooks that you need: `enqueue`, `run`, `step`, `settle`. Each awaits `call_next`."""
    calls = []

    class Log(Middleware):
        async def run(self, ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            calls.append(f"start {ctx.task}")
            result = await call_next()
            calls.append(f"end {ctx.task}")
            return result

        async def step(self, ctx: Context, step: StepCall, call_next: Callable[[], Awaitable[Any]]) -> Any:
            calls.append(f"step {step.key}")
            return await call_next()

    app = App("fundamentals", settings=settings, middleware=[Log()])

    def fetch() -> str:
        return "page"

    @app.task
    async def crawl(ctx: Context) -> str:
        return await ctx.step("fetch", fetch)

    async with app:
        handle = await crawl.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "page"
    assert calls == ["start crawl", "step fetch", "end crawl"]


async def test_a_lifespan_opens_resources_that_tasks_share(settings: Settings) -> None:
    """A lifespan is an async context manager of the app; tasks find what it yields in `ctx.resources`."""
    opened = []

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[dict[str, str]]:
        opened.append(app.name)
        yield {"database": "connection"}

    app = App("fundamentals", settings=settings, lifespan=lifespan)

    @app.task
    async def query(ctx: Context) -> str:
        return str(ctx.resources["database"])

    async with app:
        handles = [await query.enqueue() for _ in range(3)]
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert [await handle.result(timeout=10) for handle in handles] == ["connection"] * 3
    assert opened == ["fundamentals"]
