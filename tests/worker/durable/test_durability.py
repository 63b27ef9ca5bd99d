"""Asynchronous recording: a step returns at once, and the outcome waits for every record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from perdure import App, Context, Retry, Settings

from tests.support.workers import (
    BOUND,
    Gate,
    bounded,
    history,
    recorded_steps,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    """App with a long lease, so that no test waits for a heartbeat."""
    async with App("durability", settings=settings.model_copy(update={"lease": 60.0})) as app:
        yield app


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def number(value: int) -> int:
    return value


async def test_an_async_step_returns_before_its_record_is_stored(app: App, gate: Gate) -> None:
    went_on = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> int:
        value = await ctx.step("one", number, 1)
        went_on.set()
        return value

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(went_on.wait())
        assert await recorded_steps(app, handle) == {}
        gate.open.set()
        assert await bounded(handle.result()) == 1
    assert list(await recorded_steps(app, handle)) == ["d:one"]


async def test_a_sync_step_returns_after_its_record_is_stored(app: App, gate: Gate) -> None:
    went_on = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("one", number, 1)
        went_on.set()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(gate.reached.wait())
        assert not went_on.is_set()
        gate.open.set()
        await bounded(handle.result())
    assert went_on.is_set()


async def test_every_record_is_stored_before_the_outcome(app: App, gate: Gate) -> None:
    returned = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> int:
        found = [await ctx.step("one", number, value) for value in range(50)]
        returned.set()
        return sum(found)

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(returned.wait())
        assert "finish" not in gate.sent
        gate.open.set()
        assert await bounded(handle.result()) == sum(range(50))
    assert "write_checkpoint" in gate.sent
    assert "write_checkpoint" not in gate.sent[gate.sent.index("finish") :]
    assert len(await recorded_steps(app, handle)) == 50


async def test_records_added_during_a_write_are_batched_in_order(app: App, gate: Gate) -> None:
    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(20):
            await ctx.step(f"s{value}", number, value)
            gate.open.set()

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert [event.step for event in await history(handle)] == [f"s{value}" for value in range(20)]
    assert gate.sent.count("write_checkpoint") < 20


async def test_a_failed_attempt_keeps_its_records(app: App, gate: Gate) -> None:
    calls: list[int] = []

    @app.task(durability="async", retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        await ctx.step("one", calls.append, 1)
        gate.open.set()
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert calls == [1]


async def test_a_sync_step_stores_the_records_added_before_it(app: App, gate: Gate) -> None:
    seen: list[list[str]] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("later", number, 1)
        gate.open.set()
        await ctx.options(durability="sync").step("now", number, 2)
        handle = await app.producer.find(ctx.task_id)
        assert handle is not None
        seen.append(sorted(await recorded_steps(app, handle)))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert seen == [["d:later", "d:now"]]


async def test_records_added_during_a_background_write_are_stored(app: App, gate: Gate) -> None:
    ends = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("first", number, 1)
        await gate.reached.wait()
        await ctx.step("second", number, 2)
        gate.open.set()
        await ends.wait()

    async with running_worker(app):
        handle = await job.enqueue()

        async def both() -> bool:
            return set(await recorded_steps(app, handle)) == {"d:first", "d:second"}

        await wait_until(both, "the second record is stored while the handler waits for something else")
        ends.set()
        await bounded(handle.result())


async def test_a_lease_lost_in_the_background_cancels_the_run(app: App, gate: Gate) -> None:
    cancelled: list[str] = []
    started = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("one", number, 1)
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(ctx.task_id)
            raise

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(app, handle)
        gate.open.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the run that lost its lease ends before the next heartbeat")
    assert cancelled == [handle.id]
    assert await recorded_steps(app, handle) == {}
    assert (await handle.record()).worker == "thief"


async def test_a_result_after_a_lost_lease_is_refused(app: App, gate: Gate) -> None:
    started, ends = asyncio.Event(), asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> str:
        await ctx.step("one", number, 1)
        started.set()
        await ends.wait()
        return "of the loser"

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(app, handle)
        ends.set()
        gate.open.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the loser ends")
        assert (await handle.record()).result is None


async def test_a_claimed_task_has_the_stored_async_records(app: App, gate: Gate) -> None:
    """Steps stored before the first worker died are not repeated; the others are."""
    gate.open.set()
    calls: list[str] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> bool:
        await ctx.step("one", calls.append, "one")
        return ctx.resumed

    handle = await job.enqueue()
    await take_and_die(app)
    await work_off(app)
    assert await handle.result(timeout=BOUND) is False
    assert calls == ["one"]
    assert (await handle.record()).crashes == 1


async def test_an_unknown_durability_is_refused(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        try:
            await ctx.options(durability="never").step("one", number, 1)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return ""

    handle = await job.enqueue()
    await work_off(app)
    assert "durability must be one of" in await bounded(handle.result())
