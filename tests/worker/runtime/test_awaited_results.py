"""Results that a task awaits: a warning if the awaited task needs a slot of the same worker."""

from __future__ import annotations

import warnings

import pytest
from perdure import App, Context, Settings

from tests.support.workers import BOUND, running_worker

pytestmark = pytest.mark.integration


def build(settings: Settings) -> App:
    app = App("awaited", redis_url=settings.redis_url, namespace=settings.namespace)

    @app.task(queue="inner")
    async def child(ctx: Context) -> int:
        return 1

    @app.task
    async def parent(ctx: Context, *, in_step: bool) -> int:
        handle = await child.enqueue()

        async def wait() -> int:
            return await handle.result(BOUND)

        return await ctx.step("wait", wait) if in_step else await wait()

    return app


async def test_a_step_that_awaits_a_task_which_needs_a_slot_of_this_worker_is_warned_of(settings: Settings) -> None:
    app = build(settings)
    with pytest.warns(
        RuntimeWarning, match=r"waits for the result of task \S+ on queue 'inner', which its own"
    ) as seen:
        async with app, running_worker(app, concurrency=2):
            assert await (await app.tasks["parent"].enqueue(in_step=True)).result(BOUND) == 1
    (warning,) = seen
    assert warning.filename == __file__


async def test_waits_that_cannot_block_the_worker_are_not_warned_of(settings: Settings) -> None:
    app = build(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with app, running_worker(app, queues=["inner"]), running_worker(app, queues=[app.name]):
            assert await (await app.tasks["parent"].enqueue(in_step=True)).result(BOUND) == 1
        async with app, running_worker(app, concurrency=1):  # outside a step the run parks
            assert await (await app.tasks["parent"].enqueue(in_step=False)).result(BOUND) == 1
