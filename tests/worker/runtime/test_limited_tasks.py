"""Runs of limited tasks: their tokens from the start of the handler to the accepted outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, State, TaskFailed, TaskHandle
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.store import LimitStore, Taken, TakeRequest
from perdure.worker.runtime.maintenance.promoter import ClockMonitor

from tests.support.limits import held, is_free, release, store
from tests.support.workers import (
    bounded,
    history,
    partition_of,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("limited")]


async def has_state(handle: TaskHandle[Any], state: State) -> None:
    async def reached() -> bool:
        return await handle.status() is state

    await wait_until(reached, f"the task is {state}")


class Overlap:
    """How many handlers run at once."""

    def __init__(self) -> None:
        self.inside = self.largest = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.largest = max(self.largest, self.inside)

    def __exit__(self, *raised: object) -> None:
        self.inside -= 1


async def test_at_most_so_many_tasks_of_a_key_run_at_once(app: App) -> None:
    overlap = {"a": Overlap(), "b": Overlap()}
    tenants = app.limit("tenants", running=2, by="tenant")

    @app.task(limits=[tenants])
    async def work(ctx: Context, tenant: str) -> None:
        with overlap[tenant]:
            await asyncio.sleep(0.01)

    handles = [await work.enqueue(tenant) for tenant in "ababababab"]
    async with running_worker(app, concurrency=10):
        for handle in handles:
            await handle.result(timeout=30)
    assert [seen.largest for seen in overlap.values()] == [2, 2]
    await is_free(app, "tenants")


async def test_each_key_that_a_release_names_is_looked_at(app: App) -> None:
    """Many keys have their turn at the same time, and those that the release is for must not be left out."""
    tenants = app.limit("tenants", running=2, total=20, by="tenant")

    @app.task(limits=[tenants])
    async def work(ctx: Context, tenant: str) -> None:
        await asyncio.sleep(0)

    calls = [{"tenant": "large"} for _ in range(200)]
    calls += [{"tenant": f"small-{number}"} for number in range(9) for _ in range(10)]
    handles = await work.enqueue_many(calls)
    async with running_worker(app, concurrency=32):
        with anyio.fail_after(12):  # a lost turn comes again after 15 s at least
            for handle in handles:
                await handle.result(timeout=30)


async def test_a_token_of_a_new_message_needs_no_call(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    one = app.limit("one", total=1)
    taken: list[str] = []
    take = LimitStore.take

    async def counted(self: LimitStore, requests: Sequence[TakeRequest]) -> Taken:
        taken.extend(request.member for request in requests if not request.waiter)
        return await take(self, requests)

    monkeypatch.setattr(LimitStore, "take", counted)
    monkeypatch.setattr(ClockMonitor, "is_new", lambda *_: True)

    @app.task(limits=[one])
    async def work(ctx: Context) -> list[str]:
        return await held(app, "one")

    async with running_worker(app):
        handle = await work.enqueue()
        assert len(await handle.result(timeout=30)) == 1
        await is_free(app, "one")
    assert taken == []


async def test_a_token_of_a_new_message_that_is_gone_is_noticed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after a failover that has lost it."""
    one = app.limit("one", total=1)
    monkeypatch.setattr(ClockMonitor, "is_new", lambda *_: True)
    inside, go = asyncio.Event(), asyncio.Event()

    @app.task(limits=[one])
    async def work(ctx: Context) -> None:
        await redis_command(app, "DEL", app.producer.namespace.limits.holders("one"))
        inside.set()
        await go.wait()

    async with running_worker(app) as worker:
        handle = await work.enqueue()
        await bounded(inside.wait())
        worker._heartbeat.renew_now()

        async def again() -> bool:
            return len(await held(app, "one")) == 1

        await wait_until(again, "the token is taken again")
        go.set()
        await handle.result(timeout=30)
        await is_free(app, "one")


async def test_two_workers_share_a_total(app: App) -> None:
    overlap = Overlap()
    total = app.limit("all", total=1)

    @app.task(limits=[total])
    async def work(ctx: Context) -> None:
        with overlap:
            await asyncio.sleep(0.005)

    handles = [await work.enqueue() for _ in range(8)]
    async with running_worker(app, concurrency=4), running_worker(app, concurrency=4):
        for handle in handles:
            await handle.result(timeout=30)
    assert overlap.largest == 1
    await is_free(app, "all")


async def test_a_token_is_released_after_each_attempt(app: App) -> None:
    one = app.limit("one", total=1)
    seen: list[list[str]] = []

    @app.task(limits=[one], retry=Retry(max_attempts=2, base=0.0))
    async def work(ctx: Context) -> str:
        seen.append(await held(app, "one"))
        if ctx.attempt == 1:
            raise RuntimeError("once more")
        return "done"

    handle = await work.enqueue()
    async with running_worker(app):
        assert await handle.result(timeout=30) == "done"
    await is_free(app, "one")
    assert [len(tokens) for tokens in seen] == [1, 1]
    assert seen[0] != seen[1], "each attempt has a token of its own"


async def test_a_dead_letter_releases_its_token(app: App) -> None:
    one = app.limit("one", total=1)

    @app.task(limits=[one], retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        raise RuntimeError("no")

    handle = await work.enqueue()
    async with running_worker(app):
        with pytest.raises(TaskFailed):
            await handle.result(timeout=30)
        await is_free(app, "one")


async def test_a_parked_task_holds_no_token_and_gets_one_after_the_wait(app: App) -> None:
    one = app.limit("one", total=1)
    seen: list[int] = []

    @app.task(limits=[one])
    async def work(ctx: Context) -> list[Any]:
        seen.append(len(await held(app, "one")))
        return [message.content for message in await ctx.inbox(wait=3600)]

    handle = await work.enqueue()
    async with running_worker(app):
        await has_state(handle, State.WAITING)
        await is_free(app, "one")
        await handle.send("hello")
        assert await handle.result(timeout=30) == ["hello"]
        await is_free(app, "one")
    assert seen == [1, 1]


async def test_a_parked_task_may_keep_its_token(app: App) -> None:
    """No other task starts while it waits, and its next run has the same token, which is not charged again."""
    one = app.limit("one", total=1, rate="2/d", while_parked=True)
    seen: list[tuple[str, list[str]]] = []

    @app.task(limits=[one])
    async def work(ctx: Context, name: str, waits: bool) -> None:
        seen.append((name, await held(app, "one")))
        if waits:
            await ctx.inbox(wait=3600)

    async with running_worker(app):
        first = await work.enqueue("first", True)
        await has_state(first, State.WAITING)
        second = await work.enqueue("second", False)
        await has_state(second, State.LIMITED)
        partition = partition_of(app)
        at = await redis_command(app, "ZSCORE", partition.kept, first.id)

        async def renewed() -> bool:
            return bool(await redis_command(app, "ZSCORE", partition.kept, first.id) > at)

        await wait_until(renewed, "the token is renewed")
        assert await second.status() is State.LIMITED
        await first.send("go")
        await first.result(timeout=30)
        await second.result(timeout=30)
        await is_free(app, "one")
    assert [name for name, _ in seen] == ["first", "first", "second"]
    assert seen[0][1] == seen[1][1], "one token for both runs"
    assert await redis_command(app, "EXISTS", partition.kept) == 0
    assert await redis_command(app, "HEXISTS", partition.record(first.id), "keeps") == 0


async def test_a_parked_task_that_is_cancelled_keeps_no_token(app: App) -> None:
    one = app.limit("one", total=1, while_parked=True)

    @app.task(limits=[one])
    async def work(ctx: Context, waits: bool) -> None:
        if waits:
            await ctx.inbox(wait=3600)

    async with running_worker(app):
        first = await work.enqueue(True)
        await has_state(first, State.WAITING)
        second = await work.enqueue(False)
        await has_state(second, State.LIMITED)
        await first.cancel()
        await second.result(timeout=60)
        await is_free(app, "one")


async def test_a_shutdown_leaves_the_token_to_the_next_run_of_the_message(app: App) -> None:
    """Between the runs no other task starts, since the task is not done."""
    one = app.limit("one", total=1)
    order: list[str] = []
    inside = asyncio.Event()

    @app.task(limits=[one])
    async def work(ctx: Context, name: str) -> None:
        order.append(name)
        if name == "first" and not inside.is_set():
            inside.set()
            await anyio.sleep_forever()

    first = await work.enqueue("first")
    async with running_worker(app):
        await bounded(inside.wait())
        second = await work.enqueue("second")
        await has_state(second, State.LIMITED)
        tokens = await held(app, "one")
    assert await held(app, "one") == tokens, "the released message keeps its token"
    async with running_worker(app):
        await first.result(timeout=30)
        await second.result(timeout=30)
        await is_free(app, "one")
    assert order == ["first", "first", "second"]


async def test_a_message_without_a_token_takes_one_at_its_start(app: App) -> None:
    """Such as one that was put back on its stream."""
    one = app.limit("one", total=1)
    seen: list[list[str]] = []

    @app.task(limits=[one])
    async def work(ctx: Context) -> None:
        seen.append(await held(app, "one"))

    handle = await work.enqueue()
    partition = partition_of(app)
    record = partition.record(handle.id)
    env, args = await redis_command(app, "HMGET", record, "env", "args")
    gate = await redis_command(app, "HGET", record, "gate")
    await redis_command(app, "ZREM", partition.limited(gate.split()[0].decode()), handle.id)
    entry = await redis_command(app, "XADD", partition.ready, "*", "env", env, "args", args, "again", "1")
    await redis_command(app, "HSET", record, "state", "queued", "entry", entry)
    async with running_worker(app):
        await handle.result(timeout=30)
        await is_free(app, "one")
    assert seen == [[f"limited/0/{handle.id}/{entry.decode()}"]]


async def test_a_message_without_a_token_waits_where_there_is_no_room(app: App) -> None:
    one = app.limit("one", total=1)
    runs: list[str] = []

    @app.task(limits=[one], retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        runs.append(ctx.task_id)

    uses = (LimitUse("one", "-"),)
    async with running_worker(app):
        assert (await store(app).take([TakeRequest("other/0/task/1", uses)])).answers[0].granted
        handle = await work.enqueue()
        await has_state(handle, State.LIMITED)
        partition = partition_of(app)
        record = partition.record(handle.id)
        env, args, gate = await redis_command(app, "HMGET", record, "env", "args", "gate")
        await redis_command(app, "ZREM", partition.limited(gate.split()[0].decode()), handle.id)
        await redis_command(app, "HSET", record, "state", "queued")
        entry = await redis_command(app, "XADD", partition.ready, "*", "env", env, "args", args, "again", "1")
        await redis_command(app, "HSET", record, "entry", entry)
        await has_state(handle, State.LIMITED)
        found = await handle.record()
        assert (found.attempts, found.crashes) == (0, 0)
        assert runs == []
        await release(app, "other/0/task/1", uses)
        await handle.result(timeout=60)
    assert runs == [handle.id]


async def test_a_run_whose_token_another_task_has_waits_and_resumes_at_its_step(app: App) -> None:
    one = app.limit("one", total=1)
    inside = asyncio.Event()
    stops: list[str] = []

    @app.task(limits=[one], retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> str:
        await ctx.step("before", lambda: 1)
        if inside.is_set():
            assert ctx.resumption is not None
            return ctx.resumption.reason
        inside.set()
        try:
            await anyio.sleep_forever()
        finally:
            assert ctx.stopping is not None
            stops.append(ctx.stopping.reason)
        return ""

    handle = await work.enqueue()
    uses = (LimitUse("one", "-"),)
    async with running_worker(app) as worker:
        await bounded(inside.wait())
        await redis_command(app, "DEL", app.producer.namespace.limits.holders("one"))
        assert (await store(app).take([TakeRequest("other/0/task/1", uses)])).answers[0].granted
        worker._heartbeat.renew_now()
        await has_state(handle, State.LIMITED)
        assert stops == ["limit"]
        await release(app, "other/0/task/1", uses)
        assert await handle.result(timeout=60) == "a wait"
        await is_free(app, "one")
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 0)
    assert ("limit_lost", "one") in [(event.type, event.data.get("limit")) for event in await history(handle)]
    assert "d:before" in await recorded_steps(app, handle)


async def test_a_handler_uses_the_limit_of_its_task_without_another_token(app: App) -> None:
    """Its actual costs replace what was reserved for the task."""
    units = app.limit("units", total=1, cost="1000/d")

    @app.task(limits=[units.costs(900)])
    async def work(ctx: Context, actual: int) -> int:
        async with ctx.limit("units", cost=10) as use:
            tokens = len(await held(app, "units"))
            use.cost = actual
        async with ctx.limit("units", cost=50):
            pass
        return tokens

    async with running_worker(app):
        first = await work.enqueue(50)
        assert await first.result(timeout=30) == 1
        second = await work.enqueue(900)  # 100 of 1,000 were used
        assert await second.result(timeout=30) == 1
        await is_free(app, "units")
        third = await work.enqueue(1)
        await has_state(third, State.LIMITED)


async def test_a_task_that_was_stored_without_limits_obeys_those_of_its_definition(app: App) -> None:
    """Such as by a producer that names the queue, or before a deploy that gave the task limits."""
    overlap = {"a": Overlap(), "b": Overlap()}
    tenants = app.limit("tenants", running=1, by="tenant")

    @app.task(limits=[tenants])
    async def work(ctx: Context, tenant: str) -> None:
        with overlap[tenant]:
            await asyncio.sleep(0.01)

    handles = [await app.producer.enqueue("work", {"tenant": tenant}, queue="limited") for tenant in "abababab"]
    assert {await handle.status() for handle in handles} == {State.QUEUED}
    async with running_worker(app, concurrency=8):
        for handle in handles:
            await handle.result(timeout=30)
        await is_free(app, "tenants")
    assert [seen.largest for seen in overlap.values()] == [1, 1]
    assert (await handles[0].record()).attempts == 1


async def test_a_burst_works_off_tasks_that_wait_for_each_other(app: App) -> None:
    one = app.limit("one", total=1)
    done: list[int] = []

    @app.task(limits=[one])
    async def work(ctx: Context, number: int) -> None:
        await asyncio.sleep(0.01)
        done.append(number)

    for number in range(5):
        await work.enqueue(number)
    await work_off(app)
    assert done == [0, 1, 2, 3, 4]
    assert await held(app, "one") == []
