"""Uses of limits by handlers and steps: `ctx.limit`."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, State, SyncContext, TaskFailed, TaskHandle
from perdure.queues.limits.definition import Limit
from perdure.worker.durable.waiting import WaitBoard

from tests.support.limits import held, is_free, publish, waiting
from tests.support.workers import bounded, history, recorded_steps, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("limiting")]

ONE = Limit("one", total=1)
AT_ONCE = Retry(max_attempts=3, base=0.0)


@pytest.fixture(autouse=True)
def parks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park for waits that are longer than 50 ms, so that tests need not wait for a second."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)


async def parked(handle: TaskHandle[Any]) -> None:
    async def waits() -> bool:
        return await handle.status() is State.WAITING

    await wait_until(waits, "the task waits")


class Overlap:
    """How many are within a block at once."""

    def __init__(self) -> None:
        self.inside = self.largest = self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1
        self.inside += 1
        self.largest = max(self.largest, self.inside)

    def __exit__(self, *raised: object) -> None:
        self.inside -= 1


async def test_a_block_in_a_handler_holds_a_token_while_its_code_runs(app: App) -> None:
    await publish(app, ONE)
    seen: list[list[str]] = []

    @app.task
    async def use(ctx: Context) -> None:
        async with ctx.limit("one"):
            seen.append(await held(app, "one"))

    handle = await use.enqueue()
    await work_off(app)
    assert [len(found) for found in seen] == [1]
    assert seen[0][0].startswith(f"limiting/0/{handle.id}/")
    assert await held(app, "one") == []


async def test_a_handler_that_has_to_wait_is_parked_and_woken_by_the_release(app: App) -> None:
    await publish(app, ONE)
    first_in, go = asyncio.Event(), asyncio.Event()
    overlap, runs = Overlap(), []

    @app.task
    async def use(ctx: Context, name: str) -> None:
        runs.append(name)
        async with ctx.limit("one"):
            with overlap:
                if name == "first":
                    first_in.set()
                    await go.wait()

    async with running_worker(app, concurrency=2) as worker:
        first = await use.enqueue("first")
        await bounded(first_in.wait())
        second = await use.enqueue("second")
        await parked(second)
        record = await second.record()
        assert record.waits == "limit one"
        assert worker.in_flight == 1
        went = asyncio.get_running_loop().time()
        go.set()
        await second.result(timeout=30)
        took = asyncio.get_running_loop().time() - went
        await first.result(timeout=30)
    assert overlap.largest == 1
    assert runs == ["first", "second", "second"]
    assert took < 5, "the release wakes the task, before it would ask by itself"
    await is_free(app, "one")
    assert await waiting(app, "one") == []


async def test_a_release_between_the_question_and_the_park_wakes_the_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is free before the task is parked, so its release names a task that is not parked yet."""
    from perdure.worker.durable.limiting import LimitBlock

    await publish(app, ONE)
    first_in, go, released = asyncio.Event(), asyncio.Event(), asyncio.Event()
    wait = LimitBlock._wait

    async def wait_later(block: LimitBlock, retry: float) -> None:
        go.set()
        await released.wait()
        await wait(block, retry)

    monkeypatch.setattr(LimitBlock, "_wait", wait_later)

    @app.task
    async def use(ctx: Context, name: str) -> None:
        async with ctx.limit("one"):
            if name == "first":
                first_in.set()
                await go.wait()

    async with running_worker(app, concurrency=2):
        first = await use.enqueue("first")
        await bounded(first_in.wait())
        second = await use.enqueue("second")
        await first.result(timeout=30)
        await is_free(app, "one")
        loop = asyncio.get_running_loop()
        went = loop.time()
        released.set()
        await second.result(timeout=30)
        assert loop.time() - went < 5


async def test_a_step_waits_in_memory(app: App) -> None:
    await publish(app, ONE)
    overlap, runs = Overlap(), []

    @app.task
    async def use(ctx: Context, number: int) -> None:
        async def call() -> None:
            async with ctx.limit("one"):
                with overlap:
                    await asyncio.sleep(0.02)

        runs.append(number)
        await ctx.step("call", call)

    async with running_worker(app, concurrency=4):
        handles = [await use.enqueue(number) for number in range(4)]
        for handle in handles:
            await handle.result(timeout=30)
    assert overlap.entered == 4
    assert overlap.largest == 1
    assert sorted(runs) == [0, 1, 2, 3], "no run was parked"
    await is_free(app, "one")


async def test_a_step_with_a_time_out_does_not_wait_longer(app: App) -> None:
    await publish(app, ONE)
    first_in, go = asyncio.Event(), asyncio.Event()

    @app.task(retry=Retry(max_attempts=1))
    async def use(ctx: Context, name: str) -> None:
        async def call() -> None:
            async with ctx.limit("one"):
                first_in.set()
                await go.wait()

        await ctx.options(timeout=0.2 if name == "second" else None).step("call", call)

    async with running_worker(app, concurrency=2):
        first = await use.enqueue("first")
        await bounded(first_in.wait())
        second = await use.enqueue("second")
        with pytest.raises(TaskFailed, match="StepTimeout"):
            await second.result(timeout=30)

        async def none_waits() -> bool:
            return await waiting(app, "one") == []

        await wait_until(none_waits, "the step does not wait any more")
        go.set()
        await first.result(timeout=30)
    await is_free(app, "one")


async def test_recorded_steps_of_a_block_take_no_token_on_resume(app: App) -> None:
    """A limit of one start per day: the resumed run would wait for a day if it paid again."""
    await publish(app, Limit("daily", total=1, rate="1/d"))
    tries: list[str] = []
    tokens: list[int] = []

    @app.task(retry=AT_ONCE)
    async def use(ctx: Context) -> str:
        async with ctx.limit("daily"):
            first = await ctx.step("first", lambda: "a")
            second = await ctx.step("second", lambda: "b")
            tokens.append(len(await held(app, "daily")))
        tries.append(first + second)
        if len(tries) == 1:
            raise RuntimeError("after the block")
        return first + second

    handle = await use.enqueue()
    await work_off(app)
    assert await handle.result(timeout=30) == "ab"
    assert tries == ["ab", "ab"]
    assert tokens == [1, 0], "nothing is taken for recorded steps"


async def test_a_resumed_block_takes_its_token_at_the_first_step_that_is_not_recorded(app: App) -> None:
    """It is not charged again, since a step of it is recorded."""
    await publish(app, Limit("daily", total=1, rate="1/d"))
    tokens: list[tuple[str, int]] = []

    @app.task(retry=AT_ONCE)
    async def use(ctx: Context) -> str:
        async def step(name: str) -> str:
            tokens.append((name, len(await held(app, "daily"))))
            if name == "second" and len(tokens) == 2:
                raise RuntimeError("in the second step")
            return name

        async with ctx.limit("daily"):
            tokens.append(("block", len(await held(app, "daily")))) if tokens else None
            await ctx.step("first", step, "first")
            return await ctx.step("second", step, "second")

    handle = await use.enqueue()
    await work_off(app)
    assert await handle.result(timeout=30) == "second"
    assert tokens == [("first", 1), ("second", 1), ("block", 0), ("second", 1)]
    await is_free(app, "daily")


async def test_a_block_whose_step_is_not_recorded_pays_again(app: App) -> None:
    """The call of the step is made again, and so it counts again: the second run waits for the rate."""
    await publish(app, Limit("rate", rate="1/d"))
    first = asyncio.Event()

    @app.task(retry=AT_ONCE)
    async def use(ctx: Context) -> None:
        async def step() -> None:
            if not first.is_set():
                first.set()
                raise RuntimeError("the first try")

        async with ctx.limit("rate"):
            await ctx.step("call", step)

    async with running_worker(app):
        handle = await use.enqueue()
        await bounded(first.wait())
        await parked(handle)
        assert (await handle.record()).waits == "limit rate"


async def test_the_actual_cost_replaces_the_reserved_one(app: App) -> None:
    await publish(app, Limit("units", cost="1000/d"))
    done: list[int] = []

    @app.task
    async def use(ctx: Context, reserved: int, actual: int) -> None:
        async with ctx.limit("units", cost=reserved) as use:
            use.cost = actual
        done.append(reserved)

    async with running_worker(app, concurrency=1):
        first = await use.enqueue(900, 100)
        await first.result(timeout=30)

        async def released() -> bool:
            return not await held(app, "units")

        await wait_until(released, "the cost is corrected")
        second = await use.enqueue(850, 850)
        await second.result(timeout=30)
        third = await use.enqueue(500, 500)
        await parked(third)
    assert done == [900, 850]


async def test_a_breaker_counts_the_errors_of_blocks(app: App, log: list[str]) -> None:
    from perdure.queues.limits.definition import Breaker

    await publish(app, Limit("fragile", total=10, breaker=Breaker(errors=0.5, calls=2, window=60, open=60)))

    @app.task(retry=Retry(max_attempts=1))
    async def use(ctx: Context, fails: bool) -> None:
        async with ctx.limit("fragile"):
            if fails:
                raise RuntimeError("no answer")

    async with running_worker(app, concurrency=1):
        for _ in range(2):
            failed = await use.enqueue(True)
            with pytest.raises(TaskFailed):
                await failed.result(timeout=30)

        async def opened() -> bool:
            return any("limit fragile opened" in line for line in log)

        await wait_until(opened, "the breaker opens")
        blocked = await use.enqueue(False)
        await parked(blocked)


async def test_nested_uses_of_a_limit_with_one_key_are_an_error(app: App) -> None:
    await publish(app, Limit("tenants", running=1, by="tenant"))

    @app.task
    async def nested(ctx: Context, inner: str) -> str:
        async with ctx.limit("tenants", key="a"), ctx.limit("tenants", key=inner):
            return "both"

    other = await nested.enqueue("b")
    same = await nested.enqueue("a")
    async with running_worker(app):
        assert await other.result(timeout=30) == "both"
        with pytest.raises(TaskFailed, match="used here already"):
            await same.result(timeout=30)
    await is_free(app, "tenants")


async def test_a_limit_that_is_not_defined_is_an_error(app: App) -> None:
    @app.task
    async def use(ctx: Context) -> None:
        async with ctx.limit("opneai"):
            pass

    handle = await use.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed, match="limit 'opneai' is not defined"):
        await handle.result(timeout=30)


async def test_a_definition_that_redis_has_lost_is_published_again(app: App) -> None:
    limit = app.limit("own", total=1)

    @app.task
    async def use(ctx: Context) -> int:
        keys = app.producer.namespace.limits
        await app.producer.gateway.command("DEL", keys.limit("own"))
        async with ctx.limit(limit.name):
            return len(await held(app, "own"))

    handle = await use.enqueue()
    await work_off(app)
    assert await handle.result(timeout=30) == 1


async def test_a_limit_with_keys_needs_one(app: App) -> None:
    limit = Limit("tenants", running=1, by="tenant")
    await publish(app, limit)

    @app.task
    async def use(ctx: Context) -> None:
        async with ctx.limit(limit):
            pass

    handle = await use.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed, match="key must be given for limit 'tenants'"):
        await handle.result(timeout=30)


async def test_a_handler_that_waits_within_a_block_releases_its_token(app: App) -> None:
    await publish(app, ONE)

    @app.task
    async def use(ctx: Context) -> list[Any]:
        async with ctx.limit("one"):
            return [message.content for message in await ctx.inbox(wait=3600)]

    async with running_worker(app):
        handle = await use.enqueue()
        await parked(handle)
        await is_free(app, "one")
        await handle.send("hello")
        assert await handle.result(timeout=30) == ["hello"]
    await is_free(app, "one")


async def test_branches_wait_for_each_other(app: App) -> None:
    await publish(app, ONE)
    overlap = Overlap()

    @app.task
    async def use(ctx: Context) -> None:
        async def call() -> None:
            with overlap:
                await asyncio.sleep(0.02)

        async def branch(number: int) -> None:
            with ctx.scope(f"branch-{number}"):
                async with ctx.limit("one"):
                    await ctx.step("call", call)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(branch, number)

    handle = await use.enqueue()
    async with running_worker(app):
        await handle.result(timeout=30)
    assert overlap.largest == 1
    assert overlap.entered == 3
    await is_free(app, "one")


async def test_a_plain_function_uses_a_limit(app: App) -> None:
    await publish(app, ONE)
    overlap = Overlap()

    @app.task
    def use(ctx: SyncContext, number: int) -> int:
        def call() -> int:
            with ctx.limit("one"), overlap:
                return number

        with ctx.limit("one") as used:
            assert used.limit == "one"
        return ctx.step("call", call)

    async with running_worker(app, concurrency=3):
        handles = [await use.enqueue(number) for number in range(3)]
        assert [await handle.result(timeout=30) for handle in handles] == [0, 1, 2]
    assert overlap.largest == 1
    await is_free(app, "one")


async def test_a_shutdown_within_a_block_releases_the_token(app: App) -> None:
    await publish(app, ONE)
    inside = asyncio.Event()

    @app.task
    async def use(ctx: Context) -> None:
        async with ctx.limit("one"):
            inside.set()
            await anyio.sleep_forever()

    async with running_worker(app):
        await use.enqueue()
        await bounded(inside.wait())
    assert await held(app, "one") == []


async def test_a_token_that_was_taken_away_is_taken_again(app: App) -> None:
    """An operator frees the token, and nothing else wants it: the run continues with a new one."""
    await publish(app, ONE)
    inside, go = asyncio.Event(), asyncio.Event()

    @app.task
    async def use(ctx: Context) -> str:
        async with ctx.limit("one"):
            inside.set()
            await go.wait()
            return "done"

    async with running_worker(app) as worker:
        handle = await use.enqueue()
        await bounded(inside.wait())
        keys = app.producer.namespace.limits
        await app.producer.gateway.command("DEL", keys.holders("one"))
        worker._heartbeat.renew_now()

        async def again() -> bool:
            return len(await held(app, "one")) == 1

        await wait_until(again, "the token is taken again")
        go.set()
        assert await handle.result(timeout=30) == "done"
    await is_free(app, "one")


async def test_a_run_whose_token_another_one_has_stops(app: App) -> None:
    """It returns to its queue at no cost, and is parked where it uses the limit."""
    from perdure.queues.envelope import LimitUse
    from perdure.queues.limits.store import TakeRequest

    from tests.support.limits import release, store

    await publish(app, ONE)
    inside = asyncio.Event()
    stops: list[str] = []

    @app.task(retry=Retry(max_attempts=1))
    async def use(ctx: Context) -> str:
        await ctx.step("before", lambda: 1)
        async with ctx.limit("one"):
            if inside.is_set():
                assert ctx.resumption is not None
                return ctx.resumption.after
            inside.set()
            try:
                await anyio.sleep_forever()
            finally:
                assert ctx.stopping is not None
                stops.append(ctx.stopping.reason)
        return ""

    async with running_worker(app) as worker:
        handle = await use.enqueue()
        await bounded(inside.wait())
        keys = app.producer.namespace.limits
        await app.producer.gateway.command("DEL", keys.holders("one"))
        uses = (LimitUse("one", "-"),)
        taken = await store(app).take([TakeRequest("other/0/task/1", uses)])
        assert taken.answers[0].granted
        worker._heartbeat.renew_now()
        await parked(handle)
        assert stops == ["limit"]
        record = await handle.record()
        assert (record.attempts, record.crashes) == (0, 0)
        await release(app, "other/0/task/1", uses)
        assert await handle.result(timeout=60) == "wait"
    assert ("limit_lost", "one") in [(event.type, event.data.get("limit")) for event in await history(handle)]
    assert "d:before" in await recorded_steps(app, handle)
