"""Watching over the runs: no lease is kept for ever.

One look at all runs, once a second or more often, costs a run nothing but the time stamps that it sets anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.abc

from ....queues import Partition
from ...durable import Run, StopReason
from ...log import logger
from ...registry import Registry, Task
from ...settings import Settings
from ..executor import Executor
from ..handler_call import time_limit_of
from ..slots import Slots
from .loop_watchdog import stack_of_task

__all__ = ["RunDeadlines"]

_LONGEST: Final = 1.0
_SHORTEST: Final = 0.02
"""Seconds between two looks."""

_LOST_THREADS: Final = 0.5
"""Share of the threads that may be lost to steps which do not end, before another worker should take the place."""


class RunDeadlines:
    """Ends runs that take too long or do nothing, and gives up those that do not end though they were cancelled.

    What cannot be stopped (such handlers, and sync steps in threads) is left to itself; the more of it there is, the
    less the worker is worth, so it says that it should be replaced.
    """

    def __init__(
        self,
        executor: Executor,
        slots: Slots,
        registry: Registry,
        settings: Settings,
        *,
        on_due: Callable[[Partition], None],
        on_degraded: Callable[[str], None],
    ) -> None:
        """on_due: due times of a partition have changed. on_unfit: hears, once, why the worker should be replaced."""
        self._executor = executor
        self._slots = slots
        self._registry = registry
        self._settings = settings
        self._on_due = on_due
        self._on_degraded = on_degraded
        self._watched: set[Run] = set()
        self._abandoned: set[Run] = set()
        limits = [settings.time_limit, settings.idle_limit, settings.stall_limit]
        limits += [task.idle_timeout for task in registry.values() if task.idle_timeout is not None]
        self._interval = min(_LONGEST, max(_SHORTEST, min(limits) / 5))
        self.degraded: str | None = None
        """Why the worker should be replaced; None where it need not."""

    async def run(self) -> None:
        async with anyio.create_task_group() as giving_up:
            while True:
                before = time.monotonic()
                await anyio.sleep(self._interval)
                self._check(giving_up, absent=time.monotonic() - before - self._interval)

    async def abandon_all(self) -> None:
        """Give up, now, every run that was ended and whose handler has not."""
        self._watched.update(self._executor.runs)
        for run in [run for run in self._watched if run.stop_reason is not None and run.task is not None]:
            await self._abandon(run)

    def is_stuck(self, run: Run) -> bool:
        """Whether nothing is to be expected of a run: it is over its limits, or was ended and goes on."""
        return run.task is not None and (
            run.stop_reason is not None or self._over_limit(run, time.monotonic()) is not None
        )

    def _check(self, giving_up: anyio.abc.TaskGroup, absent: float) -> None:
        self._watched.update(self._executor.runs)
        now = time.monotonic()
        for run in list(self._watched):
            if run.closed:
                self._watched.discard(run)
                self._abandoned.discard(run)
            elif run.task is None:
                continue  # it has not begun
            elif run.stop_reason is None:
                if absent > self._interval:  # nobody is idle while the loop, or the process, stands still
                    run.excuse(absent)
                self._end(run, now)
            elif now - run.ended_at > self._settings.stall_limit and run not in self._abandoned:
                giving_up.start_soon(self._abandon, run)
        lost, most = self._executor.threads.lost, self._executor.threads.most
        if lost >= most * _LOST_THREADS:
            self._report_degraded(f"{lost} of {most} threads run sync steps that were ended and do not end")

    def _over_limit(self, run: Run, now: float) -> StopReason | None:
        task: Task[Any, Any] | None = self._registry.get(run.envelope.task)
        if task is None:
            return None
        if time_limit_of(run, task) is None and now - run.started > self._settings.time_limit:
            return StopReason.TIMED_OUT  # its own limit has a timer of its own
        if now - max(run.active, run.started) > (task.idle_timeout or self._settings.idle_limit):
            return StopReason.IDLE
        return None

    def _end(self, run: Run, now: float) -> None:
        over = self._over_limit(run, now)
        if over is not None:
            run.cancel(over)

    async def _abandon(self, run: Run) -> None:
        self._abandoned.add(run)
        if run.task is None:
            return
        for_seconds, ending, handler = time.monotonic() - run.ended_at, run.stop_reason, run.task
        stacks = stack_of_task(handler)
        self._slots.mark_leaked(handler)
        due = await self._executor.give_up(run)
        logger.bind(task=run.envelope.task, id=run.id, stacks=stacks).error(
            "its handler goes on {:.1f} s after it was ended ({}): the task is given up here, the slot stays taken, "
            "and whatever the handler still does is refused",
            for_seconds,
            "" if ending is None else ending.value,
        )
        if due:
            self._on_due(run.delivery.partition)
        self._report_degraded(f"a handler of task {run.envelope.task!r} does not end")

    def _report_degraded(self, why: str) -> None:
        if self.degraded is None:
            self.degraded = why
            logger.error("this worker should be replaced: {}", why)
            self._on_degraded(why)
