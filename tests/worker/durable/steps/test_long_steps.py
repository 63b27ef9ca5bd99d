"""Steps that run for a second: they store an intent, which a handoff shows after a kill -9 of their worker."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Producer, Retry, Settings, TaskHandle
from perdure.worker.durable.run import LONG_STEP

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.runs import current_run
from tests.support.workers import bounded, recorded_steps, wait_until, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def processes(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    changed = settings.model_copy(update={"lease": 1.0})
    with worker_processes(changed, tmp_path, PROGRAMS / "planning.py") as processes:
        yield processes


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def fields(producer: Producer, handle: TaskHandle[Any], kind: bytes) -> list[bytes]:
    names = await producer.gateway.command("HKEYS", handle.partition.steps(handle.id))
    return sorted(name for name in names if name.startswith(kind))


@pytest.mark.processes
@pytest.mark.parametrize("task", ["offer", "offer_in_thread"])
async def test_a_plain_step_that_a_kill_cut_off_needs_attention(
    producer: Producer, processes: WorkerProcesses, tmp_path: Path, task: str
) -> None:
    released = tmp_path / "released"
    process = await processes.start().ready()
    handle: TaskHandle[str] = await producer.enqueue(task, {"released": str(released)}, queue="planning")
    await processes.line("computes", handle.id)

    async def noted() -> bool:
        return await fields(producer, handle, b"i:") == [b"i:compute"]

    await wait_until(noted, "the intent of the long step")
    process.kill()
    await processes.start().ready()
    call = f'compute("{handle.id}","{released}")'
    await processes.line(f"in flight: {call}; attention: True; left: compute send;", handle.id)
    released.touch()
    assert await bounded(handle.result()) == "12"
    assert len(processes.lines("computes", handle.id)) == 2
    assert len(processes.lines("fetches", handle.id)) == len(processes.lines("sends", handle.id)) == 1


async def test_a_short_step_stores_no_intent_and_no_intent_outlives_its_step(app: App) -> None:
    stored: dict[str, list[str]] = {}

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        run = current_run(ctx)

        async def look(what: str, *, after: float = 0.0) -> None:
            run.note_long_steps(time.monotonic() + after)
            await run.flush()
            keys = await app.producer.gateway.command("HKEYS", run.delivery.partition.steps(run.id))
            stored[what] = sorted(key.decode() for key in keys if key.startswith(b"i:"))

        async def slow(what: str) -> None:
            await look(what, after=LONG_STEP)
            if what == "failing":
                raise RuntimeError("no price")

        await ctx.step("quick", look, "quick")
        await ctx.step("slow", slow, "slow")
        await ctx.options(intent=False).step("silent", slow, "silent")
        with pytest.raises(RuntimeError):
            await ctx.step("failing", slow, "failing")
        await ctx.step("after", look, "after")
        await look("at the end", after=LONG_STEP)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    held = {"quick": [], "slow": ["i:slow"], "silent": [], "failing": ["i:failing"], "after": [], "at the end": []}
    assert stored == held
    assert [key for key in await recorded_steps(app, handle) if key.startswith("i:")] == []
