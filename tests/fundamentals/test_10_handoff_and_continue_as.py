"""Handoff: what a run leaves for the next one when it stops, and for another task that continues its work."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from perdure import App, Context, Resumption, Worker

pytestmark = pytest.mark.integration


async def test_a_worker_that_stops_gives_its_tasks_back_with_a_handoff_document(app: App) -> None:
    """Another worker resumes the task at once, at no cost. `ctx.resumption` has the document."""
    started = asyncio.Event()
    resumptions: list[Resumption | None] = []

    def list_files() -> list[str]:
        return ["a.py", "b.py"]

    @app.task
    async def audit(ctx: Context) -> int:
        resumptions.append(ctx.resumption)
        files = await ctx.step("list", list_files)
        if len(resumptions) == 1:
            await ctx.decide("audit both files", reasoning="there are only two")
            started.set()
            await anyio.sleep_forever()
        return len(files) * ctx.attempt

    async with app:
        handle = await audit.enqueue()
        async with Worker(app) as first, asyncio.TaskGroup() as group:
            group.create_task(first.run())
            await started.wait()
            first.stop()  # SIGTERM: stop at the next step boundary
            first.stop()  # SIGTERM again: stop now
        async with Worker(app) as second:
            await second.run(burst=True)
        assert await handle.result(timeout=10) == 2  # still the first attempt

    before, after = resumptions
    assert before is None
    assert after is not None
    assert after.after == "hand_off"
    assert after.handoff is not None
    assert [decision.choice for decision in after.handoff.decisions] == ["audit both files"]


async def test_a_task_continues_as_another_task(app: App) -> None:
    """`ctx.continue_as` ends this task and enqueues its successor. The result of the first is the successor's."""

    @app.task
    async def research(ctx: Context, topic: str) -> str:
        await ctx.discover("a lease expires", source="design.md")
        await ctx.continue_as(write, why="the sources are complete", message="mind the deadline")

    @app.task
    async def write(ctx: Context, topic: str) -> str:
        received = ctx.resumption.received if ctx.resumption else None
        assert received is not None
        return f"{topic}: {received.discoveries[0].fact}; {received.message}"

    async with app:
        handle = await research.enqueue("leases")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "leases: a lease expires; mind the deadline"
        successor = await handle.successor()
        assert successor is not None
        assert successor.id != handle.id
