"""A scenario with every outcome of a task and every inspection call, for any server."""

from __future__ import annotations

import asyncio

import pytest
from perdure import App, Context, Retry, Settings, State, TaskCancelled
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import list_queues, list_tasks, list_workers

from tests.support.workers import BOUND, bounded, history, letter, running_worker


async def live(settings: Settings) -> None:
    """Enqueue, run in steps, retry, delay, cancel, bury, replay; inspect results, events, queues, workers."""
    async with App("life", settings=settings) as app:
        held, mended = asyncio.Event(), asyncio.Event()

        @app.task
        async def steps(ctx: Context, number: int) -> int:
            first = await ctx.step("first", lambda: number + 1)
            return await ctx.step("second", lambda: first * 2)

        @app.task(retry=Retry(max_attempts=3, base=0.01))
        async def stumbles(ctx: Context) -> int:
            if ctx.attempt < 2:
                raise ValueError("once")
            return ctx.attempt

        @app.task(queue="other", retry=Retry(max_attempts=1))
        async def fails(ctx: Context) -> str:
            if not mended.is_set():
                raise ValueError("until it is mended")
            return await ctx.step("late", lambda: "mended")

        @app.task(queue="other")
        async def holds(ctx: Context) -> None:
            held.set()
            await asyncio.sleep(BOUND)

        async with running_worker(app):
            many = await steps.enqueue_many({"number": number} for number in range(20))
            delayed = await steps.options(delay=0.05).enqueue(20)
            second = await stumbles.enqueue()
            failing = await fails.enqueue()
            holding = await holds.enqueue()
            assert [await bounded(handle.result()) for handle in [*many, delayed]] == [2 * n + 2 for n in range(21)]
            assert await bounded(second.result()) == 2
            dead = await letter(app, failing)
            await bounded(held.wait())
            await asyncio.sleep(settings.lease)  # heartbeats renew it, and one of them learns of the cancellation
            assert (await holding.record()).state is State.RUNNING
            await holding.cancel()
            with pytest.raises(TaskCancelled):
                await bounded(holding.result())
            gateway, namespace = app.producer.gateway, app.producer.namespace
            (listed,) = [one async for one in list_letters(gateway, [failing.partition], Filter())]
            assert listed.id == dead.id == failing.id
            assert {one.queue: one.dead for one in await list_queues(gateway, namespace)} == {"life": 0, "other": 1}
            assert len([task async for task in list_tasks(gateway, namespace)]) == 24
            mended.set()
            assert await replay(gateway, dead, Replay())
            assert await bounded(failing.result()) == "mended"
            assert [event.type for event in await history(second)].count("attempt_failed") == 1

            (worker,) = await list_workers(gateway, namespace)
            assert worker.queues == ("life", "other")
            found = await app.producer.find(second.id)
            assert found is not None
            assert await found.result() == 2
