"""Time limits and idle limits of runs, and handlers that ignore their cancellation."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable

import anyio
import orjson
import pytest
from perdure import App, Context, LeaseLost, Retry, Settings, State, TaskCancelled, Unavailable, Worker, current_step
from perdure.deadletter.policy import Reason
from perdure.queues.delivery.checkpoint import Written, write_entries
from perdure.worker.durable import checkpoint_writer as recorder_module
from perdure.worker.durable.stop_reasons import StopReason
from perdure.worker.errors import TaskDefinitionError, TaskIdle, TaskTimeout
from perdure.worker.runtime.shared_settings import WorkerTimings
from perdure.worker.runtime.supervisor_link import InheritedPipe, SupervisorLink

from tests.support.workers import (
    BOUND,
    bounded,
    history,
    letter,
    recorded_steps,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

ONCE = Retry(max_attempts=1)
Limited = Callable[..., App]


@pytest.fixture
def limited(settings: Settings) -> Limited:
    """Return a factory of apps with the given limits."""

    def make(**limits: float) -> App:
        return App("guarded", settings=Settings(**(settings.model_dump() | {"lease": 0.9} | limits)))

    return make


class Stubborn:
    """A coroutine that ignores its cancellation until the test releases it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.cancelled = 0

    async def __call__(self) -> None:
        self.started.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


# time limits


async def test_a_run_without_a_timeout_has_the_time_limit_of_the_worker(limited: Limited) -> None:
    """Progress does not extend the time limit."""
    async with limited(time_limit=0.3) as app:

        @app.task(retry=ONCE)
        async def job(ctx: Context) -> None:
            while True:
                await ctx.step("work", asyncio.sleep, 0.01)

        handle = await job.enqueue()
        await work_off(app)
        found = await letter(app, handle)
        assert (found.reason, found.attempts) == (Reason.TIMEOUT, 1)
        assert found.message == "task 'job' ran longer than 0.3 s"


@pytest.mark.parametrize("whose", ["task", "producer"])
async def test_the_timeout_of_a_task_overrides_the_time_limit_of_the_worker(limited: Limited, whose: str) -> None:
    async with limited(time_limit=0.1) as app:

        @app.task(timeout=60 if whose == "task" else None, retry=ONCE)
        async def job(ctx: Context) -> str:
            await asyncio.sleep(0.5)
            return "took its time"

        handle = await job.options(timeout=60 if whose == "producer" else None).enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "took its time"


def test_time_and_idle_limits_are_finite_by_default() -> None:
    assert Settings().time_limit == 7 * 24 * 3600
    assert Settings().idle_limit == 3600


# idle limits


async def test_an_idle_run_is_cancelled_and_retried_and_then_buried(limited: Limited) -> None:
    async with limited() as app:
        attempts: list[int] = []

        @app.task(idle_timeout=0.2, retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> None:
            attempts.append(ctx.attempt)
            await ctx.step("quick", len, "x")
            await ctx.step("fetch", asyncio.sleep, BOUND)

        handle = await job.enqueue()
        await work_off(app)
        found = await letter(app, handle)
        assert (found.reason, found.attempts, found.crashes) == (Reason.TIMEOUT, 2, 0)
        assert found.error.endswith("TaskIdle")
        assert found.message.startswith("task 'job' made no progress for 0.2 s in step 'fetch': ")
        assert attempts == [1, 2]
        assert set(await recorded_steps(app, handle)) == {"d:quick", "s:#handoff"}


async def test_the_idle_limit_of_the_worker_applies_to_tasks_without_an_idle_timeout(limited: Limited) -> None:
    async with limited(idle_limit=0.2) as app:

        @app.task(retry=ONCE)
        async def job(ctx: Context) -> None:
            await asyncio.sleep(BOUND)

        @app.task(retry=ONCE, idle_timeout=math.inf)
        async def other(ctx: Context) -> str:
            await asyncio.sleep(0.6)
            return "slept"

        handle, another = await job.enqueue(), await other.enqueue()
        await work_off(app)
        assert (await letter(app, handle)).message.startswith(
            "task 'job' made no progress for 0.2 s outside its steps: "
        )
        assert await bounded(another.result()) == "slept"


async def test_a_retry_policy_can_exclude_idle_timeouts(limited: Limited) -> None:
    async with limited() as app:

        @app.task(idle_timeout=0.2, retry=Retry(max_attempts=9, never=(TaskIdle,)))
        async def job(ctx: Context) -> None:
            await asyncio.sleep(BOUND)

        handle = await job.enqueue()
        await work_off(app)
        assert (await letter(app, handle)).attempts == 1
        assert issubclass(TaskIdle, TaskTimeout)


@pytest.mark.parametrize("alive", ["steps", "saves", "saves in a thread", "tries"])
async def test_a_run_that_makes_progress_is_not_idle(limited: Limited, alive: str) -> None:
    """The run takes longer than the idle limit; its pauses are shorter."""
    limit, rounds = 0.6, 3

    async def rest() -> None:
        await asyncio.sleep(limit / 2)

    async def saving() -> None:
        for number in range(rounds):
            await rest()
            await current_step().save(number)

    def saving_in_a_thread() -> None:
        step = current_step()
        for number in range(rounds):
            time.sleep(limit / 2)
            anyio.from_thread.run(step.save, number)

    tries: list[int] = []

    async def trying() -> None:
        await rest()
        tries.append(1)
        if len(tries) < rounds:
            raise ConnectionError

    async with limited() as app:

        @app.task(idle_timeout=limit, retry=ONCE)
        async def job(ctx: Context) -> str:
            if alive == "steps":
                for _ in range(rounds):
                    await ctx.step("rest", rest)
            elif alive == "saves":
                await ctx.step("long", saving)
            elif alive == "saves in a thread":
                await ctx.step("long", saving_in_a_thread)
            else:
                await ctx.options(retry=Retry(max_attempts=rounds, base=0.0)).step("tried", trying)
            return alive

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == alive


async def test_a_run_that_waits_for_redis_is_not_idle(limited: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is unavailable for longer than the limit while the worker records the step."""
    refused: list[float] = []

    async def away(*args: object, **options: object) -> Written:
        if len(refused) < 4:
            refused.append(time.monotonic())
            await asyncio.sleep(0.3)
            raise Unavailable("Redis is away")
        return await write_entries(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder_module, "write_entries", away)
    async with limited() as app:

        @app.task(idle_timeout=1.2, retry=ONCE)
        async def job(ctx: Context) -> int:
            return await ctx.step("step", len, "xyz")

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 3
        assert time.monotonic() - refused[0] > 1.2


async def test_a_blocked_event_loop_does_not_make_other_runs_idle(limited: Limited) -> None:
    async with limited() as app:
        blocked = asyncio.Event()

        @app.task(idle_timeout=0.5, retry=ONCE)
        async def victim(ctx: Context) -> str:
            await blocked.wait()
            return "was not idle"

        @app.task(retry=ONCE)
        async def blocks(ctx: Context) -> None:
            await asyncio.sleep(0.1)
            time.sleep(1.0)  # noqa: ASYNC251 - the test blocks the event loop
            await asyncio.sleep(0.2)
            blocked.set()

        handle, _ = await victim.enqueue(), await blocks.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "was not idle"


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_an_idle_timeout_must_be_positive(settings: Settings, wrong: float) -> None:
    app = App("guarded", settings=settings)
    with pytest.raises(TaskDefinitionError, match=r"idle_timeout must be (more than 0|a number of) seconds"):

        @app.task(idle_timeout=wrong)
        async def job(ctx: Context) -> None: ...


# handlers that ignore cancellation


async def test_a_run_that_ignores_cancellation_loses_its_task(limited: Limited, log: list[str]) -> None:
    """The attempt counts, another attempt runs, and Redis refuses later writes of the first."""
    async with limited(stall_limit=0.3) as app:
        stubborn = Stubborn()
        refused = asyncio.Event()

        @app.task(timeout=0.5, retry=Retry(max_attempts=2, base=0.0))
        async def job(ctx: Context) -> str:
            if ctx.attempt == 1:
                await stubborn()
                while True:
                    try:
                        await ctx.step("late", len, "x")
                    except LeaseLost:
                        refused.set()
                        raise
                    except asyncio.CancelledError:  # ignored as well
                        continue
            return "second attempt"

        async with running_worker(app, concurrency=2) as worker:
            handle = await job.enqueue()
            assert await bounded(handle.result()) == "second attempt"
            assert stubborn.cancelled
            assert worker.in_flight == 1  # the slot remains taken
            assert [event.type for event in await history(handle)] == ["attempt_failed"]
            stubborn.let_go.set()
            await bounded(refused.wait())

            async def idle() -> bool:
                return worker.in_flight == 0

            await wait_until(idle, "the slot is free again")
        record = await handle.record()
        assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 2, 0)
        assert await recorded_steps(app, handle) == {}
    reported = "".join(log)
    assert "(timed_out): task abandoned, slot leaked" in reported
    assert "in __call__" in reported  # the stack trace names the function


@pytest.mark.parametrize(("attempts", "state"), [(2, State.SCHEDULED), (1, State.DEAD)])
async def test_giving_up_a_run_returns_whether_its_task_runs_again(
    limited: Limited, attempts: int, state: State
) -> None:
    """If so, there is a new due time, and the worker looks at it at once."""
    async with limited() as app:
        stubborn = Stubborn()

        @app.task(retry=Retry(max_attempts=attempts, base=600.0, cap=600.0))
        async def job(ctx: Context) -> None:
            await stubborn()

        async with running_worker(app) as worker:
            handle = await job.enqueue()
            await bounded(stubborn.started.wait())
            [run] = worker._executor.runs
            run.cancel(StopReason.TIMED_OUT)
            assert await worker._executor.give_up(run) is (state is State.SCHEDULED)
            assert await handle.status() is state
            stubborn.let_go.set()
        if state is State.SCHEDULED:
            await handle.cancel()


async def test_other_tasks_run_after_a_suspect_was_abandoned(limited: Limited) -> None:
    async with limited(stall_limit=0.3, lease=60.0, heartbeat=0.2, quarantine_window=600.0) as app:
        stubborn = Stubborn()

        @app.task(timeout=0.3, retry=ONCE)
        async def suspect(ctx: Context) -> None:
            await stubborn()

        @app.task
        async def other(ctx: Context) -> str:
            return "done"

        handle = await suspect.enqueue()
        await take_and_die(app)
        await steal(app, handle, expired=True)  # a second crash in a row makes it a suspect
        later = await other.enqueue()
        async with running_worker(app, concurrency=2) as worker:
            try:
                assert await bounded(later.result()) == "done"
                assert await handle.status() is State.DEAD
                assert worker.in_flight == 1  # the abandoned handler
            finally:
                stubborn.let_go.set()


async def test_the_task_of_a_handler_that_ignores_cancellation_is_cancelled(limited: Limited) -> None:
    async with limited(stall_limit=0.3) as app:
        stubborn = Stubborn()

        @app.task
        async def job(ctx: Context) -> None:
            await stubborn()

        async with running_worker(app) as worker:
            handle = await job.enqueue()
            await bounded(stubborn.started.wait())
            await handle.cancel()
            with pytest.raises(TaskCancelled):
                await bounded(handle.result())
            stubborn.let_go.set()  # the handler returns normally

            async def idle() -> bool:
                return worker.in_flight == 0

            await wait_until(idle, "the slot is free again")
            assert worker.settled == 1
        assert await handle.status() is State.CANCELLED


async def test_a_worker_with_a_handler_that_ignores_cancellation_stops_and_hands_over(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "timings", WorkerTimings(release_limit=0.2))
    async with limited(grace=0.1) as app:
        stubborn = Stubborn()

        @app.task
        async def job(ctx: Context) -> str:
            if not stubborn.started.is_set():
                await stubborn()
            return "carried on"

        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(stubborn.started.wait())
        assert await handle.status() is State.QUEUED
        await work_off(app)
        assert await bounded(handle.result()) == "carried on"
        assert [event.type for event in await history(handle)] == ["handed_off", "resumed"]
        assert (await handle.record()).crashes == 0
        stubborn.let_go.set()


class Supervisor:
    """The supervisor's end of a link: collects the messages of the worker."""

    def __init__(self) -> None:
        read, write = os.pipe()
        unheard, self._unused = os.pipe()
        self.link = SupervisorLink("worker", InheritedPipe(unheard, write))
        self._said: list[dict[str, object]] = []
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, read: int) -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                self._said.append(orjson.loads(line))

    async def hears(self, what: str, *, lag: float = 0.0) -> dict[str, object]:
        """Wait for a message of a kind, and return it. A message with a lag must have at least the given one."""

        async def said() -> bool:
            return bool(self._found(what, lag))

        await wait_until(said, f"the worker says {what}")
        return self._found(what, lag)[0]

    def block_until_heard(self, what: str, *, lag: float) -> None:
        """Block the event loop until a message of a kind with at least this lag has arrived."""
        until = time.monotonic() + BOUND
        while not self._found(what, lag):
            assert time.monotonic() < until, f"the worker never said {what}"
            time.sleep(0.01)

    def _found(self, what: str, lag: float) -> list[dict[str, object]]:
        return [one for one in self._said if one["say"] == what and float(str(one.get("lag", lag))) >= lag]


async def test_a_worker_with_a_stuck_handler_asks_to_be_replaced(limited: Limited) -> None:
    async with limited(stall_limit=0.3) as app:
        stubborn, supervisor = Stubborn(), Supervisor()

        @app.task(timeout=0.1, retry=ONCE)
        async def job(ctx: Context) -> None:
            await stubborn()

        async with Worker(app, link=supervisor.link) as worker:
            running = asyncio.create_task(worker.run())
            assert float(str((await supervisor.hears("alive"))["lag"])) < BOUND
            await job.enqueue()
            assert (await supervisor.hears("replace"))["why"] == "a handler of task 'job' does not end"
            stubborn.let_go.set()
            worker.stop()
            await bounded(running)


async def test_threads_of_cancelled_sync_steps_are_counted_until_they_end(limited: Limited, log: list[str]) -> None:
    async with limited() as app:
        proceed, supervisor = threading.Event(), Supervisor()

        @app.task(retry=ONCE)
        async def job(ctx: Context) -> None:
            await ctx.options(timeout=0.1).step("stuck", lambda: proceed.wait(BOUND))

        async with Worker(app, link=supervisor.link) as worker:
            running = asyncio.create_task(worker.run())
            first = await job.enqueue()
            assert (await letter(app, first)).reason is Reason.TIMEOUT
            assert worker._executor.threads.lost == 1
            assert worker._deadlines.degraded is None
            await job.enqueue_many({} for _ in range(19))  # half of the threads
            why = (await supervisor.hears("replace"))["why"]
            assert why == "20 of 40 threads run cancelled sync steps that do not end"
            assert any("this worker should be replaced" in line for line in log)
            proceed.set()

            async def none() -> bool:
                return worker._executor.threads.lost == 0

            await wait_until(none, "the threads end")
            worker.stop()
            await bounded(running)


async def test_event_loop_lag_is_reported_to_the_supervisor(limited: Limited) -> None:
    async with limited(stall_warning=0.1) as app:
        supervisor = Supervisor()

        @app.task
        async def job(ctx: Context) -> None:
            supervisor.block_until_heard("alive", lag=0.2)

        async with Worker(app, link=supervisor.link) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(handle.result())
            worker.stop()
            await bounded(running)


async def test_a_cancelled_worker_does_not_wait_for_a_handler_that_ignores_cancellation(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "timings", WorkerTimings(release_limit=0.2))
    async with limited(grace=0.1) as app:
        stubborn = Stubborn()

        @app.task
        async def job(ctx: Context) -> str:
            if not stubborn.started.is_set():
                await stubborn()
            return "carried on"

        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            handle = await job.enqueue()
            await bounded(stubborn.started.wait())
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bounded(running)
        await work_off(app)
        assert await bounded(handle.result()) == "carried on"
        stubborn.let_go.set()
