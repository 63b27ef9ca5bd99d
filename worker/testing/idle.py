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
        delay = await _next_due(app, worker.queues) if wait_due else math.inf
        if delay > ends - time.monotonic():
            return outcomes.states
        await anyio.sleep(delay)


def make_worker(app: App, outermost: Middleware, concurrency: int, queues: Sequence[str] | None) -> Worker:
    """Return a worker of the app that has one more middleware, as the outermost."""
    own = app.middleware
    app.middleware = (outermost, *own)
    try:
        return Worker(app, concurrency=concurrency, queues=queues)
    finally:
        app.middleware = own


async def _next_due(app: App, queues: Sequence[str]) -> float:
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
