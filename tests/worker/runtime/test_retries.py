"""Retries and dead letters: the counters of attempts and crashes."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from perdure import App, Context, Retry, RetryLater, Snooze, State
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import TaskHandle

from tests.support.workers import (
    bounded,
    history,
    letter,
    pending,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("retries")]


async def lose(app: App, times: int) -> None:
    """Let workers take the queued message and crash, one after another."""
    entry = await take_and_die(app, name="dead-1")
    for number in range(2, times + 1):
        stream = app.producer.namespace.partition("retries").ready
        await redis_command(app, "XCLAIM", stream, "workers", f"dead-{number}", 0, entry)
        await redis_command(app, "XCLAIM", stream, "workers", f"dead-{number}", 0, entry, "IDLE", 10**7, "JUSTID")


async def reported(handle: TaskHandle[Any]) -> list[tuple[str, int, float]]:
    """Return each delay in the log of the task: reason, attempts so far, seconds until the next attempt."""
    return [
        (event.type, event.data["attempts"], event.data["delay"])
        for event in await history(handle)
        if event.type != "buried"
    ]


async def test_a_task_group_that_fails_with_an_error_that_is_never_retried_is_buried_at_once(app: App) -> None:
    async def fail(text: str) -> None:
        raise ValueError(text)

    @app.task(retry=Retry(max_attempts=3, base=0.0, never=(ValueError,)))
    async def job(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            for text in ("one", "two"):
                group.create_task(fail(text))

    handle = await job.enqueue()
    await work_off(app)
    dead = await letter(app, handle)
    assert (dead.reason, dead.attempts, dead.error, dead.message) == (Reason.NOT_RETRYABLE, 1, "ValueError", "one")


async def test_a_failed_attempt_is_retried_after_the_backoff(app: App) -> None:
    started: list[float] = []

    @app.task(retry=Retry(max_attempts=3, base=0.05, factor=4.0, jitter=0.0))
    async def job(ctx: Context) -> int:
        started.append(time.monotonic())
        if ctx.attempt < 3:
            raise ConnectionError("not yet")
        return ctx.attempt

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 3
    assert await reported(handle) == [("attempt_failed", 1, 0.05), ("attempt_failed", 2, 0.2)]
    assert all(
        later - earlier >= wait for (earlier, later), wait in zip(pairwise(started), [0.049, 0.199], strict=True)
    )
    record = await handle.record()
    assert (record.attempts, record.crashes) == (3, 0)


async def test_a_task_in_backoff_is_scheduled_without_a_pending_message(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=200, jitter=0.0))
    async def job(ctx: Context) -> None:
        raise ConnectionError

    async with running_worker(app):
        handle = await job.enqueue()

        async def put_off() -> bool:
            return await handle.status() is State.SCHEDULED

        await wait_until(put_off, "the task waits for its second attempt")
    record = await handle.record()
    assert record.due_at is not None
    assert record.enqueued_at is not None
    assert 200_000 <= record.due_at - record.enqueued_at < 230_000
    assert await pending(app) == []
    assert await redis_command(app, "XLEN", handle.partition.ready) == 0
    assert await handle.cancel() is State.CANCELLED


async def test_the_last_failed_attempt_becomes_a_dead_letter_with_its_error(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context, number: int) -> None:
        raise ConnectionError(f"attempt {ctx.attempt}")

    handle = await job.enqueue(7)
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.ATTEMPTS_EXHAUSTED
    assert (found.error, found.message) == ("ConnectionError", "attempt 2")
    assert 'raise ConnectionError(f"attempt {ctx.attempt}")' in found.traceback
    assert (found.attempts, found.crashes, found.task, found.args) == (2, 0, "job", b'{"number":7}')


@pytest.mark.parametrize("retry", [Retry(max_attempts=9, never=(KeyError,)), Retry(max_attempts=9, on=(OSError,))])
async def test_an_excluded_error_is_not_retried(app: App, retry: Retry) -> None:
    attempts: list[int] = []

    @app.task(retry=retry)
    async def job(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        raise KeyError("gone")

    handle = await job.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.NOT_RETRYABLE
    assert attempts == [1]


async def test_a_handler_that_raises_system_exit_fails_only_its_task(app: App) -> None:
    @app.task
    async def leaves(ctx: Context) -> None:
        raise SystemExit(3)

    @app.task
    async def stays(ctx: Context) -> str:
        return "here"

    handle = await leaves.enqueue()
    other = await stays.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).error == "SystemExit"
    assert await bounded(other.result()) == "here"


@pytest.mark.parametrize("raised", [SystemExit(2), KeyboardInterrupt()])
async def test_a_step_beside_others_that_exits_fails_its_task_only(app: App, raised: BaseException) -> None:
    """asyncio ends the event loop if a task raises either of them."""

    async def leave() -> None:
        raise raised

    @app.task
    async def leaves(ctx: Context) -> None:
        await asyncio.gather(ctx.step("leave", leave), ctx.step("other", asyncio.sleep, 0))

    @app.task
    async def stays(ctx: Context) -> str:
        return "here"

    handle, other = await leaves.enqueue(), await stays.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert found.error.endswith("StepExited")
    assert await bounded(other.result()) == "here"


async def test_an_error_that_is_no_exception_ends_the_attempt(app: App) -> None:
    class Odd(BaseException):
        pass

    @app.task
    async def job(ctx: Context) -> None:
        raise Odd("text")

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.message, found.attempts, found.crashes) == (Reason.NOT_RETRYABLE, "text", 1, 0)


async def test_retry_later_counts_as_an_attempt_and_sets_the_delay(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=3600, on=(OSError,)))
    async def job(ctx: Context) -> None:
        raise RetryLater(after=0.01, why="the quota is used up")

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.ATTEMPTS_EXHAUSTED, 2)
    assert found.message == "the quota is used up"
    assert (await reported(handle))[0] == ("attempt_failed", 1, 0.01)


async def test_snooze_does_not_count_as_an_attempt(app: App) -> None:
    runs: list[int] = []

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        runs.append(ctx.attempt)
        if len(runs) < 5:
            raise Snooze(after=0.01)
        return "at last"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "at last"
    assert runs == [1, 1, 1, 1, 1]
    assert await reported(handle) == [("snoozed", 0, 0.01)] * 4
    assert (await handle.record()).attempts == 1


async def test_steps_before_a_snooze_are_kept(app: App) -> None:
    calls: list[int] = []

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("once", calls.append, 1)
        if not ctx.resumed:
            raise Snooze(after=0.0)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert calls == [1]


async def test_the_producer_may_set_the_number_of_attempts(app: App) -> None:
    @app.task(retry=Retry(max_attempts=9, base=0.0))
    async def job(ctx: Context) -> None:
        raise ConnectionError

    handle = await job.options(max_attempts=1).enqueue()
    await work_off(app)
    assert (await letter(app, handle)).attempts == 1


# crashes


@pytest.mark.parametrize("crashes", [1, 3])
async def test_a_crash_is_not_an_attempt(app: App, crashes: int) -> None:
    seen: list[tuple[int, int]] = []

    @app.task(retry=Retry(max_attempts=2, max_crashes=3, base=0.0))
    async def job(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.crashes))
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await lose(app, crashes)
    await work_off(app)
    await bounded(handle.result())
    assert seen == [(1, crashes), (2, crashes)]
    record = await handle.record()
    assert (record.attempts, record.crashes) == (2, crashes)


async def test_one_crash_over_the_limit_buries_the_task_without_a_run(app: App) -> None:
    runs: list[int] = []

    @app.task(retry=Retry(max_crashes=2))
    async def job(ctx: Context) -> None:
        runs.append(1)

    handle = await job.enqueue()
    await lose(app, 3)
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.crashes, found.attempts) == (Reason.CRASH_LOOP, 3, 0)
    assert "probably kills its workers" in found.message
    assert runs == []


async def test_crashes_of_all_attempts_add_up(app: App) -> None:
    @app.task(retry=Retry(max_attempts=9, max_crashes=1, base=0.0))
    async def job(ctx: Context) -> None:
        raise ConnectionError

    handle = await job.enqueue()
    await lose(app, 1)
    async with running_worker(app):

        async def failed_once() -> bool:
            return (await handle.record()).attempts >= 1

        await wait_until(failed_once, "the task fails by itself after its crash")
        record = await handle.record()
        assert record.crashes == 1
        assert (await letter(app, handle)).reason is Reason.ATTEMPTS_EXHAUSTED
    assert (await handle.record()).crashes == 1


async def test_max_crashes_may_be_zero(app: App) -> None:
    @app.task(retry=Retry(max_crashes=0))
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    await lose(app, 1)
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.CRASH_LOOP


async def test_a_replay_resets_the_counters_and_keeps_the_steps(app: App) -> None:
    calls: list[int] = []
    broken = [True]

    @app.task(retry=Retry(max_attempts=1, max_crashes=1))
    async def job(ctx: Context) -> tuple[int, int]:
        await ctx.step("once", calls.append, 1)
        if broken:
            raise ConnectionError
        return ctx.attempt, ctx.crashes

    handle = await job.enqueue()
    await lose(app, 1)
    await work_off(app)
    found = await letter(app, handle)
    assert (found.attempts, found.crashes) == (1, 1)
    broken.clear()
    assert await replay(app.producer.gateway, found, Replay())
    await lose(app, 1)
    await work_off(app)
    assert await bounded(handle.result()) == (1, 1)
    assert calls == [1]
    assert (await handle.record()).replays == 1


async def test_a_handler_that_raises_generator_exit_has_failed(app: App) -> None:
    """Left alone, it would end the worker's asyncio task without an outcome."""

    @app.task(retry=Retry(max_attempts=1))
    async def closes(ctx: Context) -> None:
        raise GeneratorExit

    handle = await closes.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.error.endswith("TaskError")
    assert "GeneratorExit" in found.message
