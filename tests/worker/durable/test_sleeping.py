"""Sleep: a task waits without a worker, wakes by its time only, and does not sleep twice."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from perdure import App, Context, ResumeWarning, Retry, State, SyncContext, TaskHandle, Worker
from perdure.queues.delivery import settlement
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.errors import Unavailable
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.errors import StepOutsideTask
from perdure.worker.runtime import settler
from perdure.worker.settings import Settings

from tests.support.workers import bounded, history, pending, redis_command, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


@pytest.fixture(autouse=True)
def parks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park for waits that are longer than 50 ms, so that tests need not wait for a second."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    app = App("sleep", settings=settings)
    async with app:
        yield app


async def asleep(handle: TaskHandle[Any]) -> None:
    async def is_asleep() -> bool:
        return (await handle.record()).waits == "time"

    await wait_until(is_asleep, "the task sleeps")


async def types(handle: TaskHandle[Any]) -> list[str]:
    """Return the event types, without the resumptions."""
    return [event.type for event in await history(handle) if event.type != "resumed"]


async def test_a_sleeping_task_takes_no_slot_and_no_message_wakes_it(app: App) -> None:
    runs: list[float] = []

    @app.task
    async def sleeps(ctx: Context) -> float:
        runs.append(time.monotonic())
        await ctx.sleep(0.6)
        return time.monotonic() - runs[0]

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    async with running_worker(app, concurrency=1):
        handle = await sleeps.enqueue()
        await asleep(handle)
        assert await pending(app) == []
        assert await bounded((await other.enqueue()).result()) == "done"
        assert (await handle.send("wake up")).state is State.WAITING
        explained = await handle.explain()
        assert (explained.cause, explained.waits_for, explained.remedy) == ("time", "time", None)
        assert await bounded(handle.result()) >= 0.6
    assert len(runs) == 2
    assert await types(handle) == ["waiting", "waited", "left_unread"]
    waiting = (await history(handle))[0].data
    assert waiting["what"] == "time"
    assert abs(waiting["until"] / 1000 - time.time()) < 60


async def test_a_short_sleep_passes_in_memory_and_is_recorded(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitBoard, "park_after", 10.0)
    slept: list[float] = []

    @app.task(retry=AT_ONCE)
    async def sleeps(ctx: Context) -> None:
        began = time.monotonic()
        await ctx.sleep(0.2)
        slept.append(time.monotonic() - began)
        if len(slept) == 1:
            raise ValueError("once more")

    handle = await sleeps.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert slept[0] >= 0.2
    assert slept[1] < 0.2
    assert await types(handle) == ["attempt_failed"]


async def test_a_sleep_continues_in_the_next_run_and_is_slept_once(app: App) -> None:
    """Sleeps of the handler are found by their order, so their times may differ in each run."""
    ends: list[float] = []
    runs: list[str] = []

    @app.task(retry=AT_ONCE)
    async def sleeps(ctx: Context) -> None:
        runs.append("run")
        await ctx.sleep(0.3 if len(runs) == 1 else 3600)
        ends.append(time.monotonic())
        await ctx.sleep(timedelta(seconds=0.2))
        await ctx.sleep_until(datetime.now(UTC) + timedelta(seconds=0.2))
        await ctx.sleep_until(datetime(2020, 1, 1, tzinfo=UTC))
        if len(runs) == 4:
            raise ValueError("once more")

    async with running_worker(app):
        began = time.monotonic()
        handle = await sleeps.enqueue()
        await bounded(handle.result())
        assert time.monotonic() - began >= 0.7
    assert len(runs) == 5
    assert ends[0] - began >= 0.3
    assert (await types(handle)).count("waiting") == 3


async def test_branches_sleep_while_steps_run(app: App) -> None:
    """Each branch sleeps for its time. The task is parked when all of them sleep, and continues with the first."""
    order: list[str] = []
    parks: list[Any] = []

    async def work() -> str:
        await anyio.sleep(0.3)
        return "worked"

    @app.task
    async def branches(ctx: Context) -> list[str]:
        parks.append(1)

        async def nap(name: str, seconds: float) -> str:
            await ctx.sleep(seconds)
            await ctx.step(name, order.append, name)
            return name

        async def busy() -> str:
            return await ctx.step("work", work)

        return list(await asyncio.gather(nap("long", 1.2), nap("short", 0.1), busy(), nap("middle", 0.9)))

    async with running_worker(app):
        handle = await branches.enqueue()
        assert await bounded(handle.result()) == ["long", "short", "worked", "middle"]
    assert order == ["short", "middle", "long"]
    assert 1 < len(parks) <= 4


async def test_a_task_group_sleeps(app: App) -> None:
    runs: list[int] = []

    @app.task
    async def group(ctx: Context) -> str:
        runs.append(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ctx.sleep(0.4))
            tasks.create_task(ctx.sleep(0.5))
            await ctx.sleep(0.3)
        return "done"

    async with running_worker(app):
        handle = await group.enqueue()
        await asleep(handle)
        assert await pending(app) == []
        assert await bounded(handle.result()) == "done"
    assert len(runs) > 1


async def test_a_task_parks_after_a_task_group_that_failed(app: App) -> None:
    """Python 3.11 leaves the cancellation by which the group has stopped its body counted: no stop of the worker."""

    @app.task(retry=Retry(max_attempts=1))
    async def sleeps(ctx: Context) -> str | None:
        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("the group ends")

        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                group.create_task(fails())
        await ctx.sleep(0.5)
        return None if ctx.resumption is None else ctx.resumption.after

    async with running_worker(app):
        handle = await sleeps.enqueue()
        assert await bounded(handle.result()) == "wait"


async def test_a_plain_function_sleeps(app: App) -> None:
    runs: list[int] = []

    @app.task
    def plain(ctx: SyncContext) -> str:
        runs.append(1)
        ctx.sleep("0.3s")
        ctx.sleep(0.01)
        ctx.sleep_until(datetime.now(UTC))
        return "done"

    async with running_worker(app):
        handle = await plain.enqueue()
        await asleep(handle)
        assert await bounded(handle.result()) == "done"
    assert len(runs) == 2


async def test_a_worker_that_stops_parks_the_branches(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping worker parks runs as any other does, and nothing is left behind."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.5)
    started = asyncio.Event()

    @app.task
    async def branches(ctx: Context) -> None:
        started.set()
        await asyncio.gather(ctx.sleep(3600), ctx.inbox(wait=3600))

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await branches.enqueue()
        await bounded(started.wait())
        await wait_until(lambda: _count(handle, "waiting", 2), "both branches wait")
        worker.stop()
        await bounded(running)
    assert (await handle.record()).waits in ("time or message", "message or time")
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("perdure wait")]
    assert left == []


async def test_a_time_limit_ends_waits_in_memory(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitBoard, "park_after", 30.0)

    @app.task(timeout=0.3, retry=None)
    async def branches(ctx: Context) -> None:
        await asyncio.gather(ctx.sleep(3600), ctx.inbox(wait=3600))

    handle = await branches.enqueue()
    await work_off(app)
    assert (await handle.record()).state is State.DEAD
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("perdure wait")]
    assert left == []


async def test_a_cancelled_task_sleeps_no_more(app: App) -> None:
    @app.task
    async def sleeps(ctx: Context) -> None:
        await ctx.sleep("7d")

    async with running_worker(app):
        handle = await sleeps.enqueue()
        await asleep(handle)
        await handle.cancel()
        assert (await handle.record()).state is State.CANCELLED
    assert await redis_command(app, "ZCARD", handle.partition.due) == 0


@pytest.mark.parametrize(
    ("duration", "problem"),
    [
        (0, "duration must be more than 0 seconds"),
        (-1, "duration must be more than 0 seconds"),
        (timedelta(seconds=-1), "duration must be more than 0 seconds"),
        (math.nan, "duration must be a number of seconds, got nan"),
        (math.inf, "at most 115,741 days, got inf"),
        (1e300, "at most 115,741 days"),
        (timedelta.max, "at most 115,741 days"),
        ("soon", "duration must be a number of seconds"),
        ("0s", "duration must be more than 0 seconds"),
        (None, "duration must be seconds, a timedelta or a text such as '1h', got None"),
        (True, "duration must be seconds, a timedelta or a text such as '1h', got True"),
        (datetime(2100, 1, 1, tzinfo=UTC), "use ctx.sleep_until for a datetime"),
    ],
)
async def test_a_wrong_duration_is_refused(app: App, duration: Any, problem: str) -> None:
    @app.task
    async def sleeps(ctx: Context) -> None:
        with pytest.raises((TypeError, ValueError)) as refused:
            await ctx.sleep(duration)
        assert problem in str(refused.value)

    handle = await sleeps.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await types(handle) == []


@pytest.mark.parametrize(
    ("moment", "problem"),
    [
        (5, "moment must be a datetime, got 5; use ctx.sleep for a duration"),
        (datetime(2100, 1, 1), "moment must have a time zone, got 2100-01-01 00:00:00: use datetime.now(UTC)"),  # noqa: DTZ001
        (datetime.max.replace(tzinfo=UTC), "moment must be before 2286-11-20, got 9999-12-31"),
    ],
)
async def test_a_wrong_moment_is_refused(app: App, moment: Any, problem: str) -> None:
    @app.task
    async def sleeps(ctx: Context) -> None:
        with pytest.raises((TypeError, ValueError)) as refused:
            await ctx.sleep_until(moment)
        assert problem in str(refused.value)

    handle = await sleeps.enqueue()
    await work_off(app)
    await bounded(handle.result())


async def test_a_step_cannot_sleep(app: App) -> None:
    @app.task(retry=None)
    async def sleeps(ctx: Context) -> None:
        async def nap() -> None:
            with pytest.raises(StepOutsideTask, match=r"inside step 'nap': .* use asyncio\.sleep in it"):
                await ctx.sleep(1)

        await ctx.step("nap", nap)

    handle = await sleeps.enqueue()
    await work_off(app)
    await bounded(handle.result())


async def _count(handle: TaskHandle[Any], kind: str, number: int) -> bool:
    return (await types(handle)).count(kind) == number


@pytest.mark.parametrize("where", ["handler", "branch", "branch with another duration"])
async def test_a_sleep_is_found_in_a_large_checkpoint(app: App, where: str) -> None:
    """The pages of records are read when they are asked for; a sleep of an earlier run must not start again."""
    ends: list[int] = []

    @app.task
    async def sleeps(ctx: Context) -> None:
        for number in range(4 * PAGE):
            await ctx.options(durability="async").step("page", str, number)

        async def nap(seconds: float) -> None:
            await ctx.sleep(seconds)

        first = 0.2 if where.endswith("duration") else 0.3
        await (nap(0.3) if where == "handler" else asyncio.gather(nap(first), nap(0.3)))

    async with running_worker(app):
        handle = await sleeps.enqueue()
        await bounded(handle.result())
        ends += [event.data["until"] for event in await history(handle) if event.type == "waiting"]
    assert len(ends) == (1 if where == "handler" else 2)


async def test_a_run_that_waits_in_memory_is_not_idle(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitBoard, "park_after", 1.5)

    @app.task(idle_timeout=0.5, retry=None)
    async def sleeps(ctx: Context) -> str:
        await asyncio.gather(ctx.sleep(1.2), ctx.sleep(1.3))
        return "done"

    handle = await sleeps.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"


async def test_the_time_of_an_outage_counts_for_a_sleep(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that could not be parked at once is due when its sleep ends, and not later."""
    settle, tries = settlement.park, 0

    async def unavailable(*args: Any, **options: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await anyio.sleep(0.5)
            raise Unavailable("no server")
        delays.append(options["delay"])
        await settle(*args, **options)

    delays: list[float] = []
    monkeypatch.setattr(settler, "park", unavailable)

    @app.task
    async def sleeps(ctx: Context) -> None:
        await ctx.sleep(60)

    async with running_worker(app):
        handle = await sleeps.enqueue()
        await asleep(handle)
    assert 50 < delays[0] < 59.6


async def test_a_sleep_of_a_branch_that_starts_again_in_each_run_is_reported(app: App) -> None:
    """A duration that no step has computed differs in each run, so that the branch would sleep for ever."""
    runs: list[int] = []

    @app.task
    async def sleeps(ctx: Context) -> str:
        runs.append(1)
        seconds = 0.2 + len(runs) / 100 if len(runs) < 4 else 0.21
        await asyncio.gather(ctx.sleep(seconds), ctx.sleep(3600 if len(runs) < 4 else 0.22))
        return "done"

    with pytest.warns(ResumeWarning, match="waits again in a branch in place of '#sleep'"):
        async with running_worker(app):
            handle = await sleeps.enqueue()
            assert await bounded(handle.result()) == "done"
