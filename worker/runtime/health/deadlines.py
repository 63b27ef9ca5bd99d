"""Deadlines of runs: time limits, idle limits, and the end of runs that ignore cancellation; intents of long steps.

One check of all runs at least twice a second uses time stamps that runs set anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.abc

from ....queues.keys import Partition
from ....queues.runtime import RUNTIME
from ...durable.run import Run
from ...durable.stop_reasons import StopReason
from ...log import logger
from ...registry import Registry
from ...settings import Settings
from ...task import Task
from ..executor import Executor
from ..slots import Slots
from ..stages.handler_call import time_limit_of
from .loop_watchdog import stack_of_task

_MAX_LENGTH: Final = 0.5
_SHORTEST: Final = 0.02
"""Bounds of the interval between two checks, in seconds."""

_LOST_THREADS: Final = 0.5
"""Share of threads lost to steps, or of slots lost to handlers, that do not end, from which the worker is degraded."""


class RunDeadlines:
    """Cancels runs that exceed their time or idle limit, and abandons runs whose handler ignores the cancellation.

    Lets the other runs store the intents of the steps that have been running for a second.

    Handlers and threads that cannot be stopped keep running. A worker with such handlers, or with too many such
    threads, is degraded and asks to be replaced.
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
        on_check: Callable[[float], None] = lambda lag: None,
    ) -> None:
        """Args:
        on_due: called when due times of a partition changed.
        on_degraded: called once with the reason.
        on_check: called at each check with the lag of the event loop in seconds.
        """
        self._executor = executor
        self._slots = slots
        self._registry = registry
        self._settings = settings
        self._on_due = on_due
        self._on_degraded = on_degraded
        self._on_check = on_check
        self._watched: dict[Run, None] = {}  # an ordered set
        self._abandoned: set[Run] = set()
        limits = [settings.time_limit, settings.idle_limit, settings.stall_limit]
        limits += [task.idle_timeout for task in registry.values() if task.idle_timeout is not None]
        self._interval = min(_MAX_LENGTH, max(_SHORTEST, min(limits) / 5))
        self._leaking_since = math.inf
        self.degraded: str | None = None
        """Why the worker should be replaced, else None."""

    async def run(self) -> None:
        async with anyio.create_task_group() as giving_up:
            while True:
                before = RUNTIME.monotonic()
                await anyio.sleep(self._interval)
                absent = RUNTIME.monotonic() - before - self._interval
                self._check(giving_up, absent)
                self._on_check(max(0.0, absent))

    async def abandon_all(self) -> None:
        """Abandon every run that was cancelled and whose handler still runs."""
        self._watched.update(dict.fromkeys(self._executor.runs))
        for run in [run for run in self._watched if run.stop_reason is not None and run.task is not None]:
            await self._abandon(run)

    def is_stuck(self, run: Run) -> bool:
        """Return whether a run is over its limits, or was cancelled and has not ended within its time to clean up."""
        now = RUNTIME.monotonic()
        if run.task is None:
            return False
        if run.stop_reason is not None:
            return now - run.ended_at > run.cleanup_limit
        return self._over_limit(run, now) is not None

    def _check(self, giving_up: anyio.abc.TaskGroup, absent: float) -> None:
        self._watched.update(dict.fromkeys(self._executor.runs))
        now = RUNTIME.monotonic()
        for run in list(self._watched):
            if run.closed:
                del self._watched[run]
                self._abandoned.discard(run)
            elif run.task is None:
                continue  # not started yet
            elif run.stop_reason is None:
                if absent > self._interval:  # time in which the loop or the process was frozen is not idle time
                    run.excuse(absent)
                self._end(run, now)
            elif now - run.ended_at > self._settings.stall_limit and run not in self._abandoned:
                giving_up.start_soon(self._abandon, run)
        lost, most = self._executor.threads.lost, self._executor.threads.most
        if lost >= most * _LOST_THREADS:
            self._report_degraded(f"{lost} of {most} threads run cancelled sync steps that do not end")
        leaked, capacity = self._slots.leaked_slots, self._slots.capacity
        if leaked < capacity * _LOST_THREADS:
            self._leaking_since = math.inf
        elif now - (since := min(self._leaking_since, now)) > self._settings.stall_limit:
            self._report_degraded(f"{leaked} of {capacity} slots are used by handlers that do not end")
        else:
            self._leaking_since = since

    def _over_limit(self, run: Run, now: float) -> StopReason | None:
        task: Task[Any, Any] | None = self._registry.get(run.envelope.task)
        if task is None:
            return None
        if time_limit_of(run, task) is None and now - run.started > self._settings.time_limit:
            return StopReason.TIMED_OUT  # a limit of the task itself has its own timer
        if now - max(run.active, run.started) > (task.idle_timeout or self._settings.idle_limit):
            return StopReason.IDLE
        return None

    def _end(self, run: Run, now: float) -> None:
        over = self._over_limit(run, now)
        if over is not None:
            run.cancel(over)
        elif run.steps_in_flight and not run.stopped:
            run.note_long_steps(now)

    async def _abandon(self, run: Run) -> None:
        self._abandoned.add(run)
        if run.task is None:
            return
        seconds, reason, handler = RUNTIME.monotonic() - run.ended_at, run.stop_reason, run.task
        stacks = stack_of_task(handler)
        self._slots.mark_leaked(handler)
        due = await self._executor.give_up(run)
        logger.bind(task=run.envelope.task, id=run.id, stacks=stacks).error(
            "handler ignored cancellation for {:.1f} s ({}): task abandoned, slot leaked, later writes rejected",
            seconds,
            "" if reason is None else reason.value,
        )
        if due:
            self._on_due(run.delivery.partition)
        self._report_degraded(f"a handler of task {run.envelope.task!r} does not end")

    def _report_degraded(self, why: str) -> None:
        if self.degraded is None:
            self.degraded = why
            logger.error("this worker should be replaced: {}", why)
            self._on_degraded(why)
