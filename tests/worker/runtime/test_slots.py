"""Slots: how many executions run at once, and the turns of those that take several slots."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from perdure import App, Context, Retry, State, SyncContext, TaskFailed
from perdure.worker.errors import TaskDefinitionError
from perdure.worker.runtime.slots import Slots

from tests.support.workers import BOUND, bounded, running_worker, wait_until, work_off


def never() -> bool:
    return False


class Execution:
    """An execution that takes slots, and runs until its test ends it."""

    def __init__(self, slots: Slots, size: int, ends: Callable[[], bool] = never) -> None:
        self.slots, self.size, self.ends = slots, size, ends
        self.started, self.end = asyncio.Event(), asyncio.Event()
        slots.fill(self.run())

    async def run(self) -> None:
        await self.slots.enlarge(self.size, self.ends)
        self.started.set()
        await self.end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_large_execution_starts_when_the_others_leave_it_its_slots() -> None:
    slots = Slots(4, largest=3)
    small = [Execution(slots, 1) for _ in range(3)]
    large = Execution(slots, 3)
    await settle()
    assert (slots.used, slots.free, slots.busy) == (6, 0, 4)
    assert not large.started.is_set()
    small[0].end.set()
    await settle()
    assert not large.started.is_set()
    assert slots.free == 0, "nothing may get ahead of it"
    small[1].end.set()
    await bounded(large.started.wait())
    assert (slots.used, slots.free) == (4, 0)
    large.end.set()
    small[2].end.set()
    await bounded(slots.wait_empty())
    assert (slots.used, slots.free) == (0, 4)


async def test_large_executions_take_turns_and_do_not_wait_for_each_other() -> None:
    slots = Slots(4, largest=4)
    first, second, third = (Execution(slots, size) for size in (4, 4, 9))
    for execution in (first, second, third):
        await bounded(execution.started.wait())
        assert slots.used >= 4
        execution.end.set()
    await bounded(slots.wait_empty())
    assert slots.used == 0


async def test_a_slot_that_is_left_and_taken_again_counts_once() -> None:
    slots = Slots(4, largest=3)

    async def run() -> None:
        await slots.enlarge(3, never)
        assert slots.used == 3
        slots.leave()
        slots.leave()
        assert slots.used == 0
        slots.stay()
        slots.stay()
        assert slots.used == 3

    slots.fill(run())
    await bounded(slots.wait_empty())
    assert slots.used == 0


async def test_an_execution_that_is_to_end_waits_no_longer() -> None:
    slots = Slots(2, largest=2)
    small, ending = Execution(slots, 1), False
    large = Execution(slots, 2, lambda: ending)
    await settle()
    assert not large.started.is_set()
    ending = True
    await bounded(large.started.wait())
    small.end.set()
    large.end.set()
    await bounded(slots.wait_empty())


async def test_a_cancelled_wait_leaves_no_slots_behind() -> None:
    slots = Slots(2, largest=2)
    small, large = Execution(slots, 1), Execution(slots, 2)
    await settle()
    assert slots.used == 3
    await bounded(slots.cancel())
    assert (slots.used, slots.free) == (0, 2)
    assert not (small.started.is_set() and large.started.is_set())


async def test_slots_of_executions_that_do_not_end_are_not_waited_for() -> None:
    slots = Slots(4, largest=4)
    slots.leak(1)
    large = Execution(slots, 4)
    await bounded(large.started.wait())
    assert slots.free == 0
    large.end.set()
    await bounded(slots.wait_empty())
    assert slots.free == 3


def test_messages_are_asked_for_as_if_all_were_large() -> None:
    assert [Slots(16, largest).room for largest in (1, 3, 4, 16, 99)] == [16, 5, 4, 1, 1]
    slots = Slots(16, largest=4)
    slots.limit(3)
    assert slots.room == 1
    slots.limit(0)
    assert slots.room == 0


async def test_a_worker_that_may_fill_few_slots_runs_idle_tasks_one_by_one() -> None:
    """It may be the only worker, and short of memory for ever."""
    slots, end = Slots(16), asyncio.Event()
    slots.limit(1)
    assert slots.spare == 1
    slots.limit(2)
    slots.fill(end.wait())
    assert (slots.free, slots.spare) == (1, 0)
    end.set()
    await bounded(slots.wait_empty())
    assert slots.spare == 1
    slots.limit(0)
    assert slots.spare == 0


def test_large_idle_tasks_leave_half_of_the_slots_to_others() -> None:
    """Each one finds half of the slots free, after those of the ones before it."""
    assert [Slots(16, largest).spare for largest in (1, 3, 4, 8, 16, 99)] == [9, 3, 3, 2, 1, 1]


# tasks


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, "2", None])
def test_the_slots_of_a_task_are_checked(slots: Any) -> None:
    app = App("shop")
    with pytest.raises(TaskDefinitionError, match="task 'big': slots must be a whole number from 1, got"):

        @app.task(slots=slots)
        async def big(ctx: Context) -> None: ...


class Running:
    """Counts what runs at once."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.seen: list[Counter[str]] = []

    async def hold(self, name: str, wait: Callable[[], Awaitable[object]]) -> None:
        self.now[name] += 1
        self.seen.append(Counter(self.now))
        await wait()
        self.now[name] -= 1


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_worker_never_runs_more_than_its_slots_and_no_task_starves(app: App) -> None:
    running = Running()

    @app.task(slots=3)
    async def big(ctx: Context) -> None:
        await running.hold("big", lambda: asyncio.sleep(0.01))

    @app.task
    async def small(ctx: Context) -> None:
        await running.hold("small", lambda: asyncio.sleep(0.005))

    await asyncio.gather(*(task.enqueue() for _ in range(12) for task in (small, big, small)))
    await work_off(app, concurrency=4)
    assert max(3 * seen["big"] + seen["small"] for seen in running.seen) == 4
    assert sum(seen["big"] == 1 for seen in running.seen) >= 12


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_large_task_starts_although_small_ones_never_stop_coming(app: App) -> None:
    started, over = asyncio.Event(), asyncio.Event()

    @app.task(slots=4)
    async def big(ctx: Context) -> None:
        started.set()

    @app.task
    async def small(ctx: Context) -> None:
        await asyncio.sleep(0.001)
        if not started.is_set():
            await small.enqueue()

    await small.enqueue_many([{}] * 12)
    await big.enqueue()
    async with running_worker(app, concurrency=4):
        await bounded(started.wait())
    over.set()


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_task_that_takes_more_than_all_slots_runs_alone_and_is_named_once(app: App, log: list[str]) -> None:
    running = Running()

    @app.task(slots=100)
    async def huge(ctx: Context) -> None:
        await running.hold("huge", lambda: asyncio.sleep(0.005))

    @app.task
    async def small(ctx: Context) -> None:
        await running.hold("small", lambda: asyncio.sleep(0.001))

    await asyncio.gather(*(task.enqueue() for _ in range(4) for task in (huge, small)))
    await work_off(app, concurrency=2)
    assert all(seen["small"] == 0 for seen in running.seen if seen["huge"])
    assert all(seen["huge"] <= 1 for seen in running.seen)
    warned = [line for line in log if "take more slots than the 2 of this worker" in line]
    assert len(warned) == 1
    assert "huge" in warned[0]


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_worker_that_stops_gives_a_waiting_large_task_back(app: App) -> None:
    begun, end = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @app.task
    async def small(ctx: Context) -> None:
        begun.set()
        await end.wait()

    @app.task(slots=2)
    async def big(ctx: Context) -> None:
        ran.append(ctx.task_id)

    await small.enqueue()
    async with running_worker(app, concurrency=2) as worker:
        await bounded(begun.wait())
        handle = await big.enqueue()

        async def is_taken() -> bool:
            return worker.in_flight == 2

        await wait_until(is_taken, "the worker takes the large task")
        worker.stop()

        async def is_back() -> bool:
            return (await handle.record()).state is State.QUEUED

        await wait_until(is_back, "the large task waits again")
        end.set()
    assert ran == []
    record = await handle.record()
    assert (record.attempts, record.crashes) == (0, 0)
    await work_off(app)
    assert ran == [handle.id]


@pytest.mark.integration
@pytest.mark.app("shop")
async def test_a_large_task_that_waits_can_be_cancelled(app: App) -> None:
    begun, end = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @app.task
    async def small(ctx: Context) -> None:
        begun.set()
        await end.wait()

    @app.task(slots=2)
    async def big(ctx: Context) -> None:
        ran.append(ctx.task_id)

    await small.enqueue()
    async with running_worker(app, concurrency=2) as worker:
        await bounded(begun.wait())
        handle = await big.enqueue()

        async def is_taken() -> bool:
            return worker.in_flight == 2

        await wait_until(is_taken, "the worker takes the large task")
        await handle.cancel()

        async def is_cancelled() -> bool:
            return (await handle.record()).state is State.CANCELLED

        await wait_until(is_cancelled, "the large task is cancelled")
        end.set()
    assert ran == []


async def test_a_thread_that_outlives_a_large_task_keeps_all_its_slots(app: App) -> None:
    """Its memory and processors are in use until its function returns."""
    end = threading.Event()

    @app.task(slots=3, timeout=0.05, retry=Retry(max_attempts=1))
    def encode(ctx: SyncContext) -> None:
        end.wait(BOUND)

    async with running_worker(app, concurrency=4) as worker:
        try:
            with pytest.raises(TaskFailed):
                await (await encode.enqueue()).result(timeout=BOUND)
            assert (worker.stuck_handlers, worker._slots.free) == (1, 1)
        finally:
            end.set()

        async def returned() -> bool:
            return (worker.stuck_handlers, worker._slots.free) == (0, 4)

        await wait_until(returned, "the thread ends")
