"""Steps beside each other: what becomes of them when the handler ends first."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import pytest
from perdure import AlreadyDone, App, Context, Retry
from perdure.queues import State
from perdure.worker.durable.steps.current import CURRENT_RUN

from tests.support.workers import bounded, running_worker, work_off

pytestmark = pytest.mark.integration

ran: Counter[str] = Counter()


@pytest.fixture
def app(app: App) -> App:
    ran.clear()
    return app


async def outlast(name: str) -> str:
    """Run until the handler has failed."""
    run = CURRENT_RUN.get()
    assert run is not None
    ran[name] += 1
    while run.history.counters.attempts == 0 and not run.stopping:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    return name


async def fail_once(ctx: Context) -> None:
    if ctx.attempt == 1:
        while not ran:  # noqa: ASYNC110 - there is no event for any of several steps
            await asyncio.sleep(0)
        raise ConnectionError


async def test_a_failed_attempt_ends_when_the_steps_beside_it_are_recorded(app: App) -> None:
    """Else the next attempt would run them again, beside the former ones."""

    async def is_paid(name: str) -> AlreadyDone[str] | None:
        ran["verify"] += 1
        return None

    @app.task(retry=Retry(base=0.0))
    async def order(ctx: Context) -> list[str]:
        pay = ctx.options(risky=True, verify=is_paid).step("pay", outlast, "paid")
        paid, sent, _ = await asyncio.gather(pay, ctx.step("send", outlast, "sent"), ctx.step("fail", fail_once, ctx))
        return [paid, sent]

    handle = await order.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["paid", "sent"]
    assert ran == {"paid": 1, "sent": 1}
    record = await handle.record()
    assert (record.attempts, record.crashes) == (2, 0)


async def test_no_step_begins_beside_a_handler_that_has_failed(app: App) -> None:
    async def two(ctx: Context) -> str:
        first = await ctx.step("first", outlast, f"first {ctx.attempt}")
        return f"{first}, {await ctx.step('second', outlast, f'second {ctx.attempt}')}"

    @app.task(retry=Retry(base=0.0))
    async def job(ctx: Context) -> str:
        found, _ = await asyncio.gather(two(ctx), ctx.step("fail", fail_once, ctx))
        return str(found)

    handle = await job.enqueue()
    await work_off(app)
    assert (await handle.record()).state is State.SUCCEEDED
    assert "second 1" not in ran
    assert ran["first 1"] == ran["second 2"] == 1


async def test_a_failure_counts_though_a_branch_waits_for_a_message(app: App) -> None:
    @app.task(retry=Retry(base=0.0, max_attempts=1))
    async def job(ctx: Context) -> None:
        waiting = asyncio.ensure_future(ctx.inbox(wait=3600))
        await asyncio.gather(waiting, ctx.step("slow", outlast, "slow"), ctx.step("fail", fail_once, ctx))

    handle = await job.enqueue()
    await work_off(app)
    record = await handle.record()
    assert (record.state, record.attempts, ran["slow"]) == (State.DEAD, 1, 1)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_steps_that_are_not_awaited_end_with_the_run(app: App, *, cancelled: bool) -> None:
    began, ended = anyio.Event(), anyio.Event()
    left: list[asyncio.Future[None]] = []

    async def endless() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    @app.task
    async def job(ctx: Context) -> str:
        left.append(asyncio.ensure_future(ctx.step("endless", endless)))
        await began.wait()
        if cancelled:
            await anyio.sleep_forever()
        return "done"

    handle = await job.enqueue()
    async with running_worker(app):
        await bounded(began.wait())
        if cancelled:
            await handle.cancel()
        await bounded(ended.wait())
    assert (await handle.record()).state is (State.CANCELLED if cancelled else State.SUCCEEDED)
