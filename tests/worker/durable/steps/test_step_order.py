"""A task with `strict_order=True` refuses a new step that comes before recorded ones of its scope, before it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from perdure import App, Context, Retry, StepMismatch, TaskFailed, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.worker.errors import StepOutOfOrder

from tests.support.workers import bounded, letter, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)


class Effects:
    """The names of the steps that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def act(self, name: str) -> str:
        self.ran.append(name)
        return name


Handler = Callable[[Context], Awaitable[Any]]


async def two_runs(app: App, handler: Handler, *, strict: bool = True) -> TaskHandle[Any]:
    """Return an ended task whose handler fails in its first attempt."""

    @app.task(retry=AGAIN, strict_order=strict)
    async def job(ctx: Context) -> Any:
        found = await handler(ctx)
        if ctx.attempt == 1:
            raise ConnectionError("once")
        return found

    handle = await job.enqueue()
    await work_off(app)
    return handle


@pytest.mark.parametrize("strict", [True, False])
async def test_a_new_step_before_recorded_ones_does_not_run(app: App, strict: bool) -> None:
    effects = Effects()

    async def handler(ctx: Context) -> None:
        for name in ["list", "read", "write"] if ctx.attempt == 1 else ["list", "check", "read", "write"]:
            await ctx.step(name, effects.act, name)

    handle = await two_runs(app, handler, strict=strict)
    if not strict:
        await bounded(handle.result())
        assert effects.ran == ["list", "read", "write", "check"]
        return
    with pytest.raises(TaskFailed) as caught:
        await bounded(handle.result())
    assert caught.value.reason == Reason.NOT_RETRYABLE
    assert "step 'check' is new, but step 'read' of its scope was recorded by an earlier run" in str(caught.value)
    assert "call the new step after the recorded ones" in str(caught.value)
    assert effects.ran == ["list", "read", "write"]


async def test_the_first_of_the_recorded_steps_is_named_whatever_its_key(app: App) -> None:
    """The order is that of the log: that of the fields is unknown."""
    effects = Effects()

    async def handler(ctx: Context) -> None:
        for name in ["z" * 80, "m", "a"] if ctx.attempt == 1 else ["new"]:
            await ctx.tool(name, effects.act, name)

    with pytest.raises(TaskFailed, match="step 'new' is new, but step 'zzz"):
        await bounded((await two_runs(app, handler)).result())


async def test_new_steps_after_the_recorded_ones_run(app: App) -> None:
    effects = Effects()

    async def handler(ctx: Context) -> None:
        names = ["a", "b"] if ctx.attempt == 1 else ["b", "a", "c", "d"]
        for name in names:
            await ctx.step(name, effects.act, name)
            await ctx.decide(f"{name} of attempt {ctx.attempt}")

    await bounded((await two_runs(app, handler)).result())
    assert effects.ran == ["a", "b", "c", "d"]


async def test_branches_in_scopes_of_their_own_are_not_refused(app: App) -> None:
    """Each branch is at another place: some are recorded further than others, and a scope may have no record yet."""
    effects = Effects()

    async def handler(ctx: Context) -> None:
        async def branch(number: int) -> None:
            with ctx.scope(f"page-{number}"):
                for part in range(number if ctx.attempt == 1 else 4):
                    await ctx.step("fetch", effects.act, f"{number}.{part}")

        order = range(4) if ctx.attempt == 1 else (2, 0, 3, 1)
        await asyncio.gather(*(branch(number) for number in order))
        await ctx.step("end", effects.act, "end")

    await bounded((await two_runs(app, handler)).result())
    assert sorted(effects.ran) == sorted([f"{page}.{part}" for page in range(4) for part in range(4)] + ["end"])


async def test_branches_of_one_scope_are_refused_if_one_was_cut_off(app: App) -> None:
    effects = Effects()

    async def handler(ctx: Context) -> None:
        async def fetch(name: str) -> str:
            if ctx.attempt == 1 and name == "a":
                await asyncio.sleep(60)
            return await effects.act(name)

        if ctx.attempt == 1:
            branches = [asyncio.ensure_future(ctx.step("fetch", fetch, name)) for name in "ab"]
            await branches[1]
            branches[0].cancel()
            return
        await asyncio.gather(*(ctx.step("fetch", fetch, name) for name in "ab"))

    with pytest.raises(TaskFailed, match="concurrent branches need one each"):
        await bounded((await two_runs(app, handler)).result())
    assert effects.ran == ["b"]


async def test_a_step_with_an_id_and_a_recorded_one_within_another_are_checked_in_their_scope(app: App) -> None:
    effects = Effects()

    async def inner(ctx: Context) -> None:
        for name in ["one", "two"] if ctx.attempt == 1 else ["new", "one", "two"]:
            await ctx.step(name, effects.act, name)
        if ctx.attempt == 1:
            raise ConnectionError("before it is recorded")

    async def handler(ctx: Context) -> None:
        await ctx.options(step_id="7").step("pay", effects.act, "pay")
        await ctx.options(nested="record").step("outer", inner, ctx)

    with pytest.raises(TaskFailed, match="step 'outer/new' is new, but step 'outer/one' of its scope"):
        await bounded((await two_runs(app, handler)).result())
    assert effects.ran == ["pay", "one", "two"]

    async def other(ctx: Context) -> None:
        await ctx.options(step_id="7" if ctx.attempt == 1 else "8").step("pay", effects.act, "pay")

    app2 = App("order-2", settings=app.settings)
    async with app2:
        with pytest.raises(TaskFailed, match="step 'pay#:8' is new, but step 'pay#:7' of its scope"):
            await bounded((await two_runs(app2, other)).result())


async def test_a_large_checkpoint_is_checked(app: App) -> None:
    effects, count = Effects(), 700

    async def handler(ctx: Context) -> None:
        fast = ctx.options(durability="async")
        asked = range(count) if ctx.attempt == 1 else range(count - 1)
        for number in asked:
            await fast.step("fetch", effects.act, str(number))
        if ctx.attempt == 2:
            await ctx.step("new", effects.act, "new")

    with pytest.raises(TaskFailed, match=f"step 'new' is new, but step 'fetch#{count}' of its scope"):
        await bounded((await two_runs(app, handler)).result())
    assert "new" not in effects.ran


async def test_it_can_be_replayed_with_the_code_that_fits(app: App) -> None:
    effects, names = Effects(), ["a", "b"]

    async def handler(ctx: Context) -> list[str]:
        return [await ctx.step(name, effects.act, name) for name in (["a", "b"] if not effects.ran else names)]

    names[:] = ["new", "a", "b"]
    handle = await two_runs(app, handler)
    found = await letter(app, handle)
    assert found.error == "perdure.worker.errors.StepOutOfOrder"
    names[:] = ["a", "b", "new"]
    assert await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    assert effects.ran == ["a", "b", "new"]


def test_the_error_is_a_mismatch() -> None:
    error = StepOutOfOrder("b", "a")
    assert isinstance(error, StepMismatch)
    assert (error.step, error.recorded) == ("b", "a")
