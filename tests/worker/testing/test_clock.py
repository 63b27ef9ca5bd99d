"""The clock of a test: stored times pass as if the test had waited, in milliseconds."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest
import redis.asyncio
from perdure import App, Context, Retry, Snooze, TaskFailed, TaskHandle
from perdure.queues import Namespace, State, TaskNotFound, list_workers
from perdure.queues.keys import GROUP
from perdure.testing import PerdureClock, run_worker

DAY = 86_400


class Shop:
    """An app that notes what ran, and when."""

    def __init__(self, clock: PerdureClock) -> None:
        self.clock = clock
        self.began = clock.now()
        self.ran: list[tuple[str, float]] = []
        self.held, self.gate = asyncio.Event(), asyncio.Event()
        self.app = App("shop")
        self.work = self.app.task(retry=Retry(max_attempts=6, base=10.0, jitter=0.0))(self._work)
        self.remind = self.app.task(self._remind)
        self.ask = self.app.task(self._ask)
        self.hold = self.app.task(self._hold)

    def note(self, what: str) -> None:
        self.ran.append((what, (self.clock.now() - self.began).total_seconds()))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]

    async def _work(self, ctx: Context, what: str, failures: int = 0) -> str:
        self.note(what)
        if ctx.attempt <= failures:
            raise ValueError(f"no {what}")
        return what

    async def _remind(self, ctx: Context, times: int, every: float) -> int:
        self.note("remind")
        if len(self.ran) < times:
            raise Snooze(after=every)
        return times

    async def _ask(self, ctx: Context, wait: float) -> list[Any]:
        messages = await ctx.inbox(wait)
        self.note("answered" if messages else "no answer")
        return [message.content for message in messages]

    async def _hold(self, ctx: Context) -> int:
        self.held.set()
        await self.gate.wait()
        return ctx.attempt


@pytest.fixture
async def shop(perdure_clock: PerdureClock) -> AsyncIterator[Shop]:
    shop = Shop(perdure_clock)
    async with shop.app:
        yield shop


@asynccontextmanager
async def working(app: App, workers: int = 1) -> AsyncIterator[None]:
    """Run workers while the block runs."""
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(run_worker(app))
        yield


async def test_a_delay_of_days_passes_with_a_worker(shop: Shop) -> None:
    async with working(shop.app):
        handle = await shop.work.options(delay=timedelta(days=3)).enqueue("late")
        await shop.clock.advance(timedelta(days=2, hours=23))
        assert await handle.status() is State.SCHEDULED
        await shop.clock.advance(3600)
        assert await handle.result() == "late"


async def test_a_delay_of_days_passes_without_a_worker(shop: Shop) -> None:
    handle = await shop.work.options(delay=3 * DAY).enqueue("late")
    assert await shop.clock.run_until_idle(shop.app) == {}
    await shop.clock.advance(3 * DAY)
    assert shop.names == []
    assert await shop.clock.run_until_idle(shop.app) == {"succeeded": 1}
    assert await handle.result() == "late"


async def test_the_retries_of_a_task_pass_with_a_worker(shop: Shop) -> None:
    async with working(shop.app):
        handle = await shop.work.enqueue("flaky", failures=5)
        await shop.clock.advance(timedelta(hours=1))
        assert await handle.result() == "flaky"
    delays = [later - earlier for (_, earlier), (_, later) in zip(shop.ran, shop.ran[1:], strict=False)]
    assert delays == pytest.approx([10, 20, 40, 80, 160], abs=5)


async def test_run_until_idle_sets_the_time_forward_to_retries(shop: Shop) -> None:
    await shop.work.enqueue("flaky", failures=5)
    await shop.work.options(delay=60).enqueue("delayed")
    assert await shop.clock.run_until_idle(shop.app) == {"succeeded": 2, "scheduled": 5}
    assert shop.names == ["flaky", "flaky", "flaky", "delayed", "flaky", "flaky", "flaky"]


async def test_run_until_idle_leaves_delayed_tasks_unless_they_are_asked_for(shop: Shop) -> None:
    await shop.work.options(delay=7 * DAY).enqueue("later")
    await shop.ask.enqueue(2 * DAY)
    assert await shop.clock.run_until_idle(shop.app) == {"waiting": 1}
    assert await shop.clock.run_until_idle(shop.app, wait_due=True) == {"succeeded": 2}
    assert shop.names == ["no answer", "later"]


async def test_a_dead_letter_is_raised_after_its_retries(shop: Shop) -> None:
    await shop.work.enqueue("bad", failures=6)
    with pytest.raises(TaskFailed, match="ValueError: no bad"):
        await shop.clock.run_until_idle(shop.app)


async def test_a_task_that_sleeps_again_is_woken_again(shop: Shop) -> None:
    async with working(shop.app):
        handle = await shop.remind.enqueue(times=25, every=60.0)
        await shop.clock.advance(timedelta(minutes=20))
        assert len(shop.ran) == 21
        await shop.clock.advance(timedelta(minutes=10))
        assert await handle.result() == 25
    delays = [later - earlier for (_, earlier), (_, later) in zip(shop.ran, shop.ran[1:], strict=False)]
    assert delays == pytest.approx([60.0] * 24, abs=5)


async def test_tasks_run_in_the_order_of_their_times_with_two_workers(shop: Shop) -> None:
    async with working(shop.app, workers=2):
        for hours in (5, 2, 4, 1, 3):
            await shop.work.options(delay=timedelta(hours=hours)).enqueue(f"{hours}")
        await shop.clock.advance(DAY)
    assert shop.names == ["1", "2", "3", "4", "5"]
    assert [at for _, at in shop.ran] == pytest.approx([3600, 7200, 10800, 14400, 18000], abs=5)


async def test_a_wait_for_a_message_ends_with_the_message_or_the_time(shop: Shop) -> None:
    async with working(shop.app):
        answered, alone = await shop.ask.enqueue(2 * DAY), await shop.ask.enqueue(2 * DAY)
        await shop.clock.advance(DAY)
        assert await answered.status() is await alone.status() is State.WAITING
        await answered.send("yes")
        await shop.clock.advance(0)
        assert await answered.result() == ["yes"]
        await shop.clock.advance(DAY)
        assert await alone.result() == []
    assert [at for _, at in shop.ran] == pytest.approx([DAY, 2 * DAY], abs=5)


async def test_a_task_sleeps_in_a_loop(shop: Shop) -> None:
    @shop.app.task
    async def hourly(ctx: Context, times: int) -> int:
        for _ in range(times):
            await ctx.sleep(3600)
        shop.note("done")
        return times

    async with working(shop.app, workers=2):
        handle = await hourly.enqueue(24)
        await shop.clock.advance(DAY)
        assert await handle.result() == 24
    assert [at for _, at in shop.ran] == pytest.approx([DAY], abs=5)


async def test_branches_sleep_beside_each_other(shop: Shop) -> None:
    @shop.app.task
    async def race(ctx: Context) -> list[str]:
        async def nap(days: int) -> str:
            await ctx.sleep(timedelta(days=days))
            return f"{days}"

        first = await ctx.first(slow=nap(3), quick=nap(1))
        return [first.name, *await asyncio.gather(nap(2), nap(1))]

    async with working(shop.app):
        handle = await race.enqueue()
        await shop.clock.advance(timedelta(days=3, minutes=1))
        assert await handle.result() == ["quick", "2", "1"]


async def test_a_result_expires(shop: Shop) -> None:
    handle = await shop.work.enqueue("short")
    await shop.clock.run_until_idle(shop.app)
    await shop.clock.advance(DAY - 60)
    assert await handle.result() == "short"
    await shop.clock.advance(120)
    with pytest.raises(TaskNotFound):
        await handle.result()


@pytest.mark.parametrize("running", [True, False])
async def test_dead_letters_are_removed_after_their_retention(shop: Shop, running: bool) -> None:
    handle = await shop.work.enqueue("bad", failures=6)
    await shop.clock.run_until_idle(shop.app, allow_failures=True)
    async with working(shop.app, workers=2 if running else 0):
        await shop.clock.advance(shop.app.settings.dead_letter_ttl - 60)
        assert await handle.status() is State.DEAD
        await shop.clock.advance(120)
        if not running:
            await shop.clock.run_until_idle(shop.app)
        with pytest.raises(TaskNotFound):
            await handle.status()


async def test_the_lease_of_a_running_task_lasts_through_a_jump(shop: Shop) -> None:
    async with working(shop.app, workers=2):
        handle = await shop.hold.enqueue()
        await shop.held.wait()
        for _ in range(5):
            shop.clock.jump(shop.app.settings.lease * 0.4)
            await anyio.sleep(0.01)
        shop.clock.jump(30 * DAY)
        shop.gate.set()
        assert await handle.result() == 1


async def lose(shop: Shop) -> TaskHandle[str]:
    """Enqueue a task, and lose the worker that gets it."""
    handle = await shop.work.enqueue("resumed")
    async with redis.asyncio.Redis.from_url(shop.clock.redis_url) as lost:
        await lost.xgroup_create(handle.partition.ready, GROUP, id="0")
        assert await lost.xreadgroup(GROUP, "lost-worker", {handle.partition.ready: ">"})
    return handle


async def test_the_lease_of_a_lost_worker_expires(shop: Shop) -> None:
    handle, lease = await lose(shop), shop.app.settings.lease
    async with working(shop.app, workers=2):
        await shop.clock.advance(lease - 2)
        assert shop.names == []
        await shop.clock.advance(4)
        assert await handle.result() == "resumed"
    assert [at for _, at in shop.ran] == pytest.approx([lease], abs=5)


async def test_run_until_idle_sets_the_time_forward_to_the_end_of_a_lost_lease(shop: Shop) -> None:
    handle = await lose(shop)
    assert await shop.clock.run_until_idle(shop.app) == {"succeeded": 1}
    assert await handle.result() == "resumed"


HANGING = """
import asyncio
import itertools
from perdure import App, Context, Worker

app = App("shop")


@app.task
async def fragile(ctx: Context) -> int:
    print("started", flush=True)
    await asyncio.Event().wait()
    return 0


async def run():
    async with Worker(app) as worker:
        await worker.run()


asyncio.run(run())
"""


@pytest.fixture
def hanging_worker(perdure_clock: PerdureClock) -> Iterator[subprocess.Popen[str]]:
    """A worker process whose task does not end."""
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.processes
async def test_a_task_of_a_worker_process_survives_steps_and_its_crash(
    perdure_clock: PerdureClock, hanging_worker: subprocess.Popen[str]
) -> None:
    app = App("shop")
    lease = app.settings.lease

    @app.task
    async def fragile(ctx: Context) -> int:
        return ctx.crashes

    async with app:
        handle = await fragile.enqueue()
        assert hanging_worker.stdout is not None
        assert await anyio.to_thread.run_sync(hanging_worker.stdout.readline) == "started\n"
        async with run_worker(app):
            for _ in range(4):
                perdure_clock.jump(lease)
            with pytest.raises(TimeoutError, match="could not move the clock"):
                await perdure_clock.advance(lease, timeout=0.1)
            hanging_worker.kill()
            await anyio.to_thread.run_sync(hanging_worker.wait)
            await perdure_clock.advance(timedelta(hours=1))
            assert await handle.result() == 1


async def test_workers_stay_registered_through_a_jump(shop: Shop) -> None:
    async with working(shop.app):
        shop.clock.jump(30 * DAY)
        gateway = shop.app.settings.make_gateway(shop.app.encryptor)
        await gateway.open()
        [worker] = await list_workers(gateway, Namespace(shop.clock.namespace))
        await gateway.close()
        assert not worker.presumed_dead


async def test_a_task_that_does_not_end_stops_the_clock(shop: Shop) -> None:
    async with working(shop.app):
        await shop.hold.enqueue()
        await shop.held.wait()
        with pytest.raises(TimeoutError, match=r"could not move the clock: after 0.05 s message .* of queue 'shop'"):
            await shop.clock.advance(DAY, timeout=0.05)
        shop.gate.set()
        await shop.clock.advance(DAY)


async def test_a_datetime_is_one_of_the_clock(shop: Shop) -> None:
    await shop.clock.advance(40 * DAY)
    handle = await shop.work.options(delay=shop.clock.now() + timedelta(hours=1)).enqueue("then")
    async with working(shop.app):
        await shop.clock.move_to(shop.clock.now() + timedelta(minutes=59))
        assert await handle.status() is State.SCHEDULED
        await shop.clock.move_to(shop.clock.now() + timedelta(minutes=1))
        assert await handle.result() == "then"
    assert (shop.clock.now() - datetime.now(UTC)).days == 40


async def test_the_time_flows_with_that_of_the_host(perdure_clock: PerdureClock) -> None:
    first, began = perdure_clock.now(), time.monotonic()
    await anyio.sleep(0.02)
    assert timedelta(seconds=0.02) <= perdure_clock.now() - first
    assert perdure_clock.now() - first <= timedelta(seconds=time.monotonic() - began + 0.001)


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, timedelta(days=-1)])
async def test_the_clock_only_moves_forward(perdure_clock: PerdureClock, wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        await perdure_clock.advance(wrong)
    with pytest.raises(ValueError, match="must be"):
        perdure_clock.jump(wrong)


async def test_a_moment_has_a_time_zone_and_is_not_past(perdure_clock: PerdureClock) -> None:
    with pytest.raises(ValueError, match="must have a time zone"):
        await perdure_clock.move_to(datetime(2100, 1, 1))  # noqa: DTZ001 - the mistake
    with pytest.raises(ValueError, match="only moves forward"):
        await perdure_clock.move_to(perdure_clock.now() - timedelta(seconds=1))
    with pytest.raises(TypeError, match="must be seconds or a timedelta"):
        await perdure_clock.advance("1h")  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_other_clients_use_the_server(perdure_clock: PerdureClock, protocol: int) -> None:
    connected = redis.asyncio.Redis.from_url(perdure_clock.redis_url, protocol=protocol)
    async with connected as client, client.pubsub() as sub:
        await client.hset("hash", mapping={"a": 1})
        await client.zadd("scores", {"b": 1.5})
        assert await client.hgetall("hash") == {b"a": b"1"}
        assert [[*pair] for pair in await client.zrange("scores", 0, -1, withscores=True)] == [[b"b", 1.5]]
        assert await client.get("nothing") is None
        assert await client.blpop("list", timeout=0.01) is None
        await sub.subscribe("news")
        assert (await sub.get_message(timeout=5) or {})["type"] == "subscribe"
        await client.publish("news", "now")
        assert (await sub.get_message(timeout=5) or {})["data"] == b"now"


async def test_tasks_start_when_their_limit_has_room(perdure_clock: PerdureClock) -> None:
    app = App("limited")
    bell = app.limit("bell", rate="1/m", burst=1)
    began: list[datetime] = []

    @app.task(limits=[bell])
    async def ring(ctx: Context, number: int) -> None:
        began.append(perdure_clock.now())

    async with app:
        await ring.enqueue_many({"number": number} for number in range(4))
        assert await perdure_clock.run_until_idle(app) == {"succeeded": 4}
    delays = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(began)]
    assert delays == pytest.approx([60, 60, 60], abs=5)


async def test_no_time_passes_between_children_that_take_turns(perdure_clock: PerdureClock) -> None:
    """Nothing in a queue shows that the next child is launched, or that a token is given back: the clock waits."""
    app = App("family")
    desk = app.limit("desk", total=2)
    began: list[datetime] = []

    @app.task(limits=[desk])
    async def child(ctx: Context, number: int) -> int:
        began.append(perdure_clock.now())
        return number

    @app.task
    async def parent(ctx: Context) -> int:
        numbers = sum(await ctx.gather(child, range(30), limit=4))
        began.append(perdure_clock.now())
        return numbers

    async with app, perdure_clock.run_worker(app):
        handle = await parent.enqueue()
        start = perdure_clock.now()
        await perdure_clock.advance(timedelta(hours=1))
        assert await handle.result() == sum(range(30))
    assert max(began) - start < timedelta(seconds=30), "the wait for a token is looked at after 30 s"
