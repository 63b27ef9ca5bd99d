"""Steps: named parts of a task whose results are recorded once."""

from __future__ import annotations

import pytest
from perdure import App, Context, Retry, StepMismatch, TaskFailed, Worker, current_step

pytestmark = pytest.mark.integration


async def test_a_recorded_step_does_not_run_again(app: App) -> None:
    """When a task is tried again, its function runs from the top, and recorded steps return their recorded results."""
    calls = []

    def fetch(url: str) -> str:
        calls.append(url)
        return f"content of {url}"

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def summarize(ctx: Context, url: str) -> str:
        text = await ctx.step("fetch", fetch, url)
        if ctx.attempt == 1:
            raise ConnectionError("the first attempt fails after the step")
        return text

    async with app:
        handle = await summarize.enqueue("https://example.org")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "content of https://example.org"
    assert calls == ["https://example.org"]


async def test_steps_of_the_same_name_are_numbered(app: App) -> None:
    """The first step named `count` is recorded as `count`, the next ones as `count#2`, `count#3`."""

    def length(word: str) -> int:
        return len(word)

    @app.task
    async def measure(ctx: Context, words: list[str]) -> list[int]:
        return [await ctx.step("count", length, word) for word in words]

    async with app:
        handle = await measure.enqueue(["one", "three", "eleven"])
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == [3, 5, 6]
        steps = [event.step async for event in handle.events(follow=False) if event.type == "step_completed"]
        assert steps == ["count", "count#2", "count#3"]


async def test_every_run_must_ask_for_the_same_steps(app: App) -> None:
    """A step has the same arguments in each run; put the clock, random numbers and network calls into steps."""

    def charge(amount: int) -> str:
        return f"charged {amount}"

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def settle(ctx: Context) -> str:
        await ctx.step("charge", charge, ctx.attempt)  # 1 in the first attempt, 2 in the second
        raise ConnectionError

    async with app:
        handle = await settle.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskFailed, match=StepMismatch.__name__):
            await handle.result(timeout=10)


async def test_a_step_has_an_idempotency_key_that_each_try_shares(app: App) -> None:
    """A crash may cut a step off after its effect. Send the key along, so that the other side recognizes a repeat."""
    keys = []

    def pay(order: str) -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            raise ConnectionError("no answer: was it paid?")
        return f"receipt for {order}"

    @app.task
    async def checkout(ctx: Context, order: str) -> str:
        return await ctx.options(retry=Retry(max_attempts=2, base=0)).step("pay", pay, order)

    async with app:
        handle = await checkout.enqueue("A17")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "receipt for A17"
    assert len(keys) == 2
    assert keys[0] == keys[1]
