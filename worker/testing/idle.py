"""Run an app's worker in a test: beside it, or until nothing is left to do."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from ...deadletter.error_text import error_text
from ...queues.durations import Duration, to_seconds
from ...queues.envelope import is_task_id
from ...queues.errors import TaskFailed
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Namespace
from ...queues.records import State
from ...queues.transport.gateway import Gateway
from ..app import App
from ..context import Context
from ..middleware import CallNext, Middleware, Settlement
from ..runtime.worker import Worker


@asynccontextmanager
async def run_worker(app: App, *, concurrency: int = 16, queues: Sequence[str] | None = None) -> AsyncIterator[Worker]:
    """Run a worker beside the block, which ends it: after running tasks, or at once if the block raises.

    Args:
        app: the app; it need not be open.
        concurrency, queues: as of `Worker`.
    """
    async with Worker(app, concurrency=concurrency, queues=queues) as worker:
        running = asyncio.create_task(worker.run(), name="perdure test worker")
        try:
            yield worker
            worker.stop()
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])


async def run_until_idle(
    app: App,
    *,
    wait_due: bool = False,
    allow_failures: bool = False,
    timeout: Duration = 30.0,
    concurrency: int = 16,
    queues: Sequence[str] | None = None,
) -> Counter[str]:
    """Run a worker until no task of its queues is queued or running, and no task that failed here waits for a retry.

    Args:
        app: the app; it need not be open.
        wait_due: also wait for delayed tasks and for tasks that sleep, those that are due before `timeout`. Times are
            those of the server: nothing is skipped.
        allow_failures: return although a task became a dead letter.
        timeout: seconds or a timedelta after which the worker is stopped; its tasks stay queued.
        concurrency, queues: as of `Worker`.

    Returns:
        How many runs ended in each state: `{"succeeded": 2, "scheduled": 1}` for a task that failed once, and then
        succeeded, and for one that succeeded at once.

    Raises:
        TaskFailed: a task became a dead letter; its cause is the error that the handler raised.
        TimeoutError: there was still something to do.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    outcomes, limit = Outcomes(), to_seconds(timeout, "timeout")
    ends = time.monotonic() + limit
    while True:
        with anyio.move_on_after(ends - time.monotonic()) as scope:
            async with make_worker(app, outcomes, concurrency, queues) as worker:
                await worker.run(burst=True)
        if not allow_failures:
            outcomes.check()
        if scope.cancelled_caught:
            raise outcomes.time_out(app, limit)
        delay = await next_due(app, worker.queues) if wait_due else math.inf
        if delay > ends - time.monotonic():
            return outcomes.states
        await anyio.sleep(delay)


async def drain(
    app: App,
    *,
    due: bool = False,
    allow_failures: bool = False,
    timeout: Duration = 30.0,
    concurrency: int = 16,
    queues: Sequence[str] | None = None,
) -> Counter[str]:
    """Run a worker until nothing is left to do, as `run_until_idle`; with `due`, also delayed tasks and retries.

    Args:
        app: the app; it need not be open.
        due: run delayed tasks, and tasks that wait for a retry, at once, whenever they are due. Tasks that sleep or
            wait for something stay as they are: `perdure_clock` lets time pass for them.
        allow_failures, timeout, concurrency, queues: as of `run_until_idle`.

    Returns:
        How many runs ended in each state.

    Raises:
        TaskFailed: a task became a dead letter; its cause is the error that the handler raised.
        TimeoutError: there was still something to do, as with a task that snoozes again and again.
    """
    __tracebackhide__ = True
    outcomes, limit = _DueOutcomes(app) if due else Outcomes(), to_seconds(timeout, "timeout")
    with anyio.move_on_after(limit) as scope:
        async with app:
            served = make_worker(app, outcomes, concurrency, queues).queues
            again = True
            while again:
                if due:
                    await _make_due(app, served)
                async with make_worker(app, outcomes, concurrency, queues) as worker:
                    await worker.run(burst=True)
                again = due and await _make_due(app, served) > 0
    if not allow_failures:
        outcomes.check()
    if scope.cancelled_caught:
        raise outcomes.time_out(app, limit)
    return outcomes.states


async def _make_due(app: App, queues: Sequence[str]) -> int:
    """Make delayed tasks and retries due now; return their number. Tasks that are parked stay where they are."""
    gateway, namespace, count = app.producer.gateway, Namespace(app.settings.namespace), 0
    for partition in [found for name in queues for found in await queue_partitions(gateway, namespace, name)]:
        members = await gateway.command("ZRANGE", partition.due, 0, -1)
        tasks = [task for member in members if is_task_id(task := member.decode("utf-8", "replace"))]
        records = [("HMGET", partition.record(task), "state", "waits") for task in tasks]
        found = await gateway.pipeline(records, node_of=partition.due) if records else []
        delayed = [task for task, fields in zip(tasks, found, strict=True) if fields == [b"scheduled", None]]
        if delayed:
            scores = [argument for task in delayed for argument in (0, task)]
            await gateway.command("ZADD", partition.due, "XX", *scores)
            await gateway.command("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "due")  # wakes the promoter
        count += len(delayed)
    return count


def make_worker(app: App, outermost: Middleware, concurrency: int, queues: Sequence[str] | None) -> Worker:
    """Return a worker of the app that has one more middleware, as the outermost."""
    own = app.middleware
    app.middleware = (outermost, *own)
    try:
        return Worker(app, concurrency=concurrency, queues=queues)
    finally:
        app.middleware = own


async def next_due(app: App, queues: Sequence[str]) -> float:
    """Return the seconds until the next task of these queues is due; infinity without one."""
    gateway: Gateway = app.settings.make_gateway(app.encryptor)
    await gateway.open()
    try:
        namespace = Namespace(app.settings.namespace)
        partitions = [one for name in queues for one in await queue_partitions(gateway, namespace, name)]
        sets = [key for one in partitions for key in (one.due, one.rings)]
        found = await gateway.pipeline([("ZRANGE", key, 0, 0, "WITHSCORES") for key in sets])
        now, micros = await gateway.command("TIME")
    finally:
        await gateway.close()
    first = min((float(one[1]) for one in found if one), default=math.inf)
    return max(0.0, first / 1000 - int(now) - int(micros) / 1e6)


class Outcomes(Middleware):
    """Counts the outcomes, and keeps the first dead letter and the error that led to it."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.failed: TaskFailed | None = None
        self.error: BaseException | None = None
        self.running: dict[str, str] = {}
        """Tasks whose runs have not been settled, in words."""
        self._retries: dict[str, str] = {}
        self.owed: set[str] = set()
        """Tasks that failed here and run again later."""

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        self._retries.pop(ctx.task_id, None)
        self.owed.discard(ctx.task_id)
        self.running[ctx.task_id] = f"task {ctx.task!r} {ctx.task_id} runs"
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        self.states[str(settlement.state)] += 1
        if settlement.state is not State.QUEUED:  # released, when the time was up
            self.running.pop(ctx.task_id, None)
        if settlement.state is State.SCHEDULED:
            self.owed.add(ctx.task_id)
        error = settlement.error
        shown = {} if error is None else {"error": type(error).__name__, "message": error_text(error)}
        if settlement.state is State.DEAD and self.failed is None:
            self.failed = TaskFailed(ctx.task_id, settlement.reason or "", {"task": ctx.task, **shown})
            self.error = error
        elif settlement.state is State.SCHEDULED and error is not None:
            what = f"task {ctx.task!r} {ctx.task_id} waits {settlement.delay:g} s for its retry"
            self._retries[ctx.task_id] = f"{what} after {type(error).__name__}: {error_text(error)}"

    def unfinished(self) -> str:
        """Return what the worker was waiting for."""
        return "; ".join([*self.running.values(), *self._retries.values()]) or "its queues were not empty"

    def check(self) -> None:
        """Raise `TaskFailed` if a task became a dead letter; its cause is the error of the handler."""
        __tracebackhide__ = True
        if self.failed is not None:
            raise self.failed from self.error

    def time_out(self, app: App, limit: float) -> TimeoutError:
        """Return the error that names what is left to do."""
        return TimeoutError(f"app {app.name!r} was not idle after {limit:g} seconds: {self.unfinished()}")


class _DueOutcomes(Outcomes):
    """Makes the retry of each task that failed due at once."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await super().settle(ctx, settlement, call_next)
        if settlement.state is State.SCHEDULED:
            await _make_due(self._app, [ctx.queue])
