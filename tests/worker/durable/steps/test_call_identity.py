"""A resumed run finds what its event calls, sends and reads have recorded, in any order of concurrent branches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from perdure import App, Context, Retry, TaskFailed, TaskHandle
from perdure.deadletter.policy import Reason

from tests.support.runs import current_run
from tests.support.workers import (
    bounded,
    history,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)
ORDERS = {"the same": [0, 1, 2, 3, 4, 5], "reversed": [5, 4, 3, 2, 1, 0], "mixed": [3, 0, 5, 1, 4, 2]}


async def in_turn(branch: Callable[[int], Awaitable[Any]], order: list[int]) -> list[Any]:
    """Run branches concurrently, so that they begin in this order. Return their results in the order of the numbers."""
    tasks = {number: asyncio.ensure_future(branch(number)) for number in order}
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [await tasks[number] for number in sorted(order)]


def two_runs(app: App, handler: Callable[[Context], Awaitable[Any]]) -> Any:
    """Return a task whose handler fails in its first attempt after everything was recorded."""

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Any:
        found = await handler(ctx)
        if ctx.attempt == 1:
            raise ConnectionError("once")
        return found

    return job


async def contents(handle: TaskHandle[Any]) -> list[Any]:
    return [message.content for message in await handle.pending_messages()]


async def logged(handle: TaskHandle[Any], kind: str, field: str) -> list[Any]:
    return [event.data[field] for event in await history(handle) if event.type == kind]


@pytest.mark.parametrize("order", ORDERS)
async def test_branches_log_and_send_once_in_another_order(app: App, order: str) -> None:
    target = await app.producer.enqueue("receiver", queue="elsewhere")

    async def handler(ctx: Context) -> list[Any]:
        async def branch(number: int) -> list[int | None]:
            await ctx.discover(f"fact {number}", source="a page")
            await ctx.decide(f"choice {number}")
            message = await ctx.add_message("assistant", f"text {number}")
            sent = await ctx.send(target, {"n": number})
            return [message.n, sent.number]

        return await in_turn(branch, ORDERS["the same" if ctx.attempt == 1 else order])

    first: list[list[Any]] = []

    async def noted(ctx: Context) -> list[Any]:
        first.append(await handler(ctx))
        return first[-1]

    handle = await two_runs(app, noted).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert first[0] == first[1]
    assert await logged(handle, "discovered", "fact") == [f"fact {n}" for n in range(6)]
    assert await logged(handle, "decided", "choice") == [f"choice {n}" for n in range(6)]
    assert len(await logged(handle, "message_added", "message")) == len(await logged(handle, "message_sent", "to")) == 6
    assert await contents(target) == [{"n": n} for n in range(6)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("unrecorded", [{0}, {5}, {1, 3}, {0, 1, 2, 3, 4, 5}], ids=str)
async def test_a_send_that_was_cut_off_is_repeated_under_its_own_id(app: App, order: str, unrecorded: set[int]) -> None:
    """Each message arrives once, although Redis stored it and the run died before it recorded that."""
    target = await app.producer.enqueue("receiver", queue="elsewhere")

    async def handler(ctx: Context) -> None:
        async def branch(number: int) -> None:
            await ctx.send(target, number)

        await in_turn(branch, ORDERS["the same" if ctx.attempt == 1 else order])
        if ctx.attempt == 1:  # records of the sends, by number
            partition = current_run(ctx).delivery.partition
            lost = ["d:#send" if n == 0 else f"d:#send#{n + 1}" for n in unrecorded]
            await redis_command(app, "HDEL", partition.steps(ctx.task_id), *lost)

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await contents(target) == list(range(6))


async def test_equal_sends_of_branches_all_arrive(app: App) -> None:
    target = await app.producer.enqueue("receiver", queue="elsewhere")

    async def handler(ctx: Context) -> None:
        await asyncio.gather(*(ctx.send(target, "the same") for _ in range(3)))

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await contents(target) == ["the same"] * 3


async def test_a_send_with_other_content_is_a_mismatch_in_the_handler(app: App) -> None:
    target = await app.producer.enqueue("receiver", queue="elsewhere")

    async def handler(ctx: Context) -> None:
        await ctx.send(target, ctx.attempt)

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed) as caught:
        await bounded(handle.result())
    assert caught.value.reason == Reason.NOT_RETRYABLE
    assert "step '#send' was recorded with arguments" in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
async def test_branches_read_their_own_messages_in_another_order(app: App, order: str) -> None:
    async def handler(ctx: Context) -> list[Any]:
        async def branch(number: int) -> list[Any]:
            return [one.content for one in await ctx.inbox(sender=f"sender-{number}")]

        return await in_turn(branch, ORDERS["the same" if ctx.attempt == 1 else order])

    handle = await two_runs(app, handler).options(delay=60).enqueue()
    for number in range(6):
        await handle.send(number, sender=f"sender-{number}")
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
    await work_off(app)
    assert await bounded(handle.result()) == [[n] for n in range(6)]


async def test_events_in_scopes_are_recorded_apart(app: App) -> None:
    async def handler(ctx: Context) -> None:
        async def branch(number: int) -> None:
            with ctx.scope(f"page-{number}"):
                await ctx.discover("the same fact", source=f"{number}")

        await in_turn(branch, ORDERS["the same" if ctx.attempt == 1 else "mixed"])

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await logged(handle, "discovered", "source") == [str(n) for n in range(6)]
    assert b"d:page-3/#discovered" in await redis_command(app, "HKEYS", handle.partition.steps(handle.id))


async def test_an_event_whose_text_differs_in_each_run_is_logged_once_by_the_handler(app: App) -> None:
    """The handler's own asyncio task makes its calls in one order, so its records are taken by order."""

    async def handler(ctx: Context) -> None:
        for number in range(3):
            await ctx.discover(f"fact {number} of attempt {ctx.attempt}")

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await logged(handle, "discovered", "fact") == [f"fact {n} of attempt 1" for n in range(3)]


async def test_a_new_event_of_a_branch_is_logged(app: App) -> None:
    async def handler(ctx: Context) -> None:
        facts = ["a", "b"] if ctx.attempt == 1 else ["c", "b", "a"]
        await asyncio.gather(*(ctx.discover(fact) for fact in facts))

    handle = await two_runs(app, handler).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await logged(handle, "discovered", "fact") == ["a", "b", "c"]


@pytest.mark.parametrize("concurrent", [False, True])
async def test_records_of_earlier_versions_are_found_by_order(app: App, concurrent: bool) -> None:
    """They have no digest of the call."""

    async def handler(ctx: Context) -> list[Any]:
        async def act(number: int) -> Any:
            await ctx.discover(f"fact {number}")
            return [one.content for one in await ctx.inbox(limit=1)]

        if concurrent:
            found = await asyncio.gather(*(act(number) for number in range(3)))
        else:
            found = [await act(number) for number in range(3)]
        if ctx.attempt == 1:
            steps = current_run(ctx).delivery.partition.steps(ctx.task_id)
            await current_run(ctx).flush()
            for field, value in (await recorded_steps(app, handle)).items():
                former = b"{}\n" + value.partition(b"\n")[2]
                await redis_command(app, "HSET", steps, field, former)
            await handle.send("late")
        return found

    handle = await two_runs(app, handler).options(delay=60).enqueue()
    for number in range(3):
        await handle.send(number)
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
    await work_off(app)
    assert sorted(await bounded(handle.result())) == [[0], [1], [2]]
    assert await logged(handle, "discovered", "fact") == ["fact 0", "fact 1", "fact 2"]


async def test_a_wait_of_the_handler_is_its_own_although_a_branch_reads_first(app: App) -> None:
    """The first run waits before its branch has read; the second run reads in the branch before it waits."""
    runs: list[int] = []

    @app.task
    async def job(ctx: Context) -> list[Any]:
        runs.append(1)
        early = await asyncio.ensure_future(ctx.inbox(sender="bob")) if len(runs) > 1 else []
        found = await ctx.inbox(wait=math.inf, sender="ada")
        return [one.content for one in early + found]

    async def waits() -> bool:
        return (await handle.record()).waits is not None

    async with running_worker(app):
        handle = await job.enqueue()
        await wait_until(waits, "it waits")
        started = await redis_command(app, "HGET", handle.partition.steps(handle.id), "s:#inbox")
        await handle.send("from bob", sender="bob")
        await wait_until(lambda: _runs(runs, 2), "it has run again")
        await wait_until(waits, "it waits again")
        assert await redis_command(app, "HGET", handle.partition.steps(handle.id), "s:#inbox") == started
        assert orjson.loads(started)["until"] is None
        await handle.send("from ada", sender="ada")
        assert await bounded(handle.result()) == ["from bob", "from ada"]


async def _runs(runs: list[int], count: int) -> bool:
    return len(runs) >= count


@pytest.mark.parametrize("order", ORDERS)
async def test_artifacts_and_memories_of_branches_are_found_in_another_order(app: App, order: str) -> None:
    async def handler(ctx: Context) -> list[Any]:
        async def branch(number: int) -> tuple[str, str]:
            saved = await ctx.artifacts.save(f"{number}.txt", f"text {number}")
            added = await ctx.memory.add(f"memory {number}")
            return saved.hash, added.id

        return await in_turn(branch, ORDERS["the same" if ctx.attempt == 1 else order])

    found: list[list[Any]] = []

    async def noted(ctx: Context) -> None:
        found.append(await handler(ctx))

    handle = await two_runs(app, noted).enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert found[0] == found[1]
    assert len(await logged(handle, "artifact_saved", "name")) == len(set(found[0])) == 6
