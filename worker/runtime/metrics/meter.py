"""The meter of one worker: counters and histograms that the event loop fills, and a copy for other threads.

The hot path adds to plain numbers: one lookup of (queue, task), then attributes and lists. It takes no lock. Other
threads copy with `copied`, which may run at any point of an addition: dict.copy() and list() are atomic in CPython, so
a dictionary does not change while it is copied, and each number is whole. What a copy may miss is a part of the
observation that is being added, such as its sum; the next copy has it. No number ever falls.

Nothing here raises: an observation that cannot be counted is dropped, counted, and logged once a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final

from ....queues.keys import Partition
from ....queues.runtime import RUNTIME
from ...durable.run import Run
from ...durable.stop_reasons import StopReason
from ...log import logger
from ..outcome import Burial, Limited, Outcome
from .families import (
    BUCKETS,
    CRASHES,
    DEAD,
    ERRORS,
    LIMITS,
    MAX_ALL_STEPS,
    MAX_STEPS,
    MAX_TASKS,
    OTHER,
    RAN,
    RUNS,
    STEP_RETRIES,
    STEPS,
    UNLABELLED,
    WAITS,
    Key,
)

if TYPE_CHECKING:
    from ....deadletter.policy import Reason

_QUIET: Final = 60.0
"""Seconds between two log lines about observations that could not be counted."""

_CLOCK_KEPT: Final = 1.0
"""Seconds for which the clock of Redis is not asked for again."""

_WINDOW: Final = 60.0
"""Seconds for which an extreme is shown at least."""


def _histogram() -> list[float]:
    return [0.0] * (len(BUCKETS) + 2)


def _observe(numbers: list[float], seconds: float) -> None:
    """Add an observation: the sum is in the first place, the buckets after it."""
    numbers[bisect_left(BUCKETS, seconds) + 1] += 1
    numbers[0] += seconds


class _TaskCounts:
    """Counts of one task on one queue."""

    __slots__ = ("clock", "clock_until", "crashes", "dead", "outcomes", "ran", "step_retries", "steps", "waits")

    def __init__(self) -> None:
        self.waits = _histogram()
        self.ran = _histogram()
        self.outcomes: dict[str, int] = {}
        self.dead: dict[str, int] = {}
        self.steps: dict[str, list[float]] = {}
        self.crashes = 0
        self.step_retries = 0
        self.clock: float | None = None
        """Seconds by which the clock of Redis is ahead of the monotonic one; asked for again at `clock_until`."""
        self.clock_until = 0.0

    def copied(self, queue: str, task: str) -> Iterator[tuple[Key, list[float]]]:
        for name, histogram in ((WAITS, self.waits), (RAN, self.ran)):
            numbers = list(histogram)
            if any(numbers):
                yield (name, queue, task), numbers
        for name, counted in ((RUNS, self.outcomes), (DEAD, self.dead)):
            for value, number in counted.copy().items():
                yield (name, queue, task, value), [number]
        for step, histogram in self.steps.copy().items():
            yield (STEPS, queue, task, step), list(histogram)
        for name, number in ((CRASHES, self.crashes), (STEP_RETRIES, self.step_retries)):
            if number:
                yield (name, queue, task), [number]


class RecentExtreme:
    """The greatest or the least value of the last minute, or of up to two. One thread notes, any thread may read."""

    def __init__(self, choose: Callable[[float, float], float]) -> None:
        """choose: max or min."""
        self._choose = choose
        self._state: tuple[float, float | None, float | None] = (-2 * _WINDOW, None, None)
        """When the present minute began, the extreme of the minute before it, and that of the present one."""

    def note(self, value: float) -> None:
        """Note a value."""
        now, (began, former, present) = RUNTIME.monotonic(), self._state
        if now - began >= _WINDOW:
            began, former, present = now, present if now - began < 2 * _WINDOW else None, None
        self._state = (began, former, value if present is None else self._choose(present, value))

    @property
    def value(self) -> float | None:
        """The extreme; None without a value."""
        now, (began, former, present) = RUNTIME.monotonic(), self._state
        if now - began >= 2 * _WINDOW or present is None:
            return None
        if now - began >= _WINDOW or former is None:
            return present
        return self._choose(former, present)


class Meter:
    """Counts what the runs of a worker do. Called in its event loop; `copied` may be called from any thread."""

    def __init__(
        self,
        tasks: Collection[str],
        queues: Collection[str],
        limits: Collection[str],
        clock: Callable[[Partition], float | None],
    ) -> None:
        """tasks, queues, limits: names that become labels. clock: see `ClockMonitor.ahead`."""
        self._tasks = tasks
        self._queues = queues
        self._limits = limits
        self._clock = clock
        self._counts: dict[tuple[str, str], _TaskCounts] = {}
        self._waits_by_limit: dict[str, int] = {}
        self._unlabelled = {"task": 0, "step": 0}
        self._steps = 0
        self._errors = 0
        self.lag = RecentExtreme(max)
        """Lag of the event loop in seconds."""
        self.margin = RecentExtreme(min)
        """Part of the lease that was left at a renewal."""
        self._quiet_until = 0.0

    # observations

    def began(self, run: Run) -> None:
        """Count a run whose handler is about to be called."""
        try:
            delivery = run.delivery
            counts = self._of(delivery.partition.queue, run.envelope.task)
            if delivery.count == 1:  # else its wait was counted when it was handed out first
                now = RUNTIME.monotonic()
                if now >= counts.clock_until:
                    counts.clock, counts.clock_until = self._clock(delivery.partition), now + _CLOCK_KEPT
                if counts.clock is not None:
                    waited = now + counts.clock - int(delivery.entry.partition(b"-")[0]) / 1000
                    _observe(counts.waits, waited if waited > 0 else 0.0)
            elif run.history.lost:
                counts.crashes += 1
        except Exception as error:  # noqa: BLE001 - no task fails because of a metric
            self._note(error)

    def ended(self, run: Run, outcome: Outcome | None, at: float) -> None:
        """Count a run that has ended.

        Args:
            outcome: what was stored; None if the worker could store nothing, because another one has the task.
            at: when the handler had ended, by the monotonic clock.
        """
        try:
            counts = self._of(run.delivery.partition.queue, run.envelope.task)
            stop = StopReason.LOST.value if outcome is None else outcome.stop.value
            counts.outcomes[stop] = counts.outcomes.get(stop, 0) + 1
            if run.closed or run.task is not None:
                _observe(counts.ran, at - run.started)
            elif run.history.lost:
                counts.crashes += 1
            if isinstance(outcome, Burial):
                counts.dead[outcome.reason.value] = counts.dead.get(outcome.reason.value, 0) + 1
            elif isinstance(outcome, Limited):
                limit = outcome.limit if outcome.limit in self._limits else OTHER
                self._waits_by_limit[limit] = self._waits_by_limit.get(limit, 0) + 1
        except Exception as error:  # noqa: BLE001 - as in `began`
            self._note(error)

    def buried(self, queue: str, reason: Reason) -> None:
        """Count a message that became a dead letter without a run."""
        try:
            counts = self._of(queue, OTHER)
            counts.dead[reason.value] = counts.dead.get(reason.value, 0) + 1
        except Exception as error:  # noqa: BLE001 - as in `began`
            self._note(error)

    def step_ended(self, run: Run, key: str, seconds: float, attempt: int) -> None:
        """Count a step that was called. attempt: number of its last try."""
        try:
            counts = self._of(run.delivery.partition.queue, run.envelope.task)
            name = key.rpartition("/")[2].partition("#")[0]
            numbers = counts.steps.get(name)
            if numbers is None:
                numbers = self._new_step(counts, name)
            _observe(numbers, seconds)
            if attempt > 1:
                counts.step_retries += attempt - 1
        except Exception as error:  # noqa: BLE001 - as in `began`
            self._note(error)

    # for other threads

    def copied(self) -> dict[Key, list[float]]:
        """Return a copy of all counts."""
        found: dict[Key, list[float]] = {}
        for (queue, task), counts in self._counts.copy().items():
            found.update(counts.copied(queue, task))
        for limit, number in self._waits_by_limit.copy().items():
            found[LIMITS, limit] = [number]
        for label, number in self._unlabelled.items():
            found[UNLABELLED, label] = [number]
        found[ERRORS,] = [self._errors]
        return found

    # labels

    def _of(self, queue: str, task: str) -> _TaskCounts:
        counts = self._counts.get((queue, task))
        if counts is not None:
            return counts
        known = queue if queue in self._queues else OTHER
        if task not in self._tasks or len(self._counts) >= MAX_TASKS:
            if task in self._tasks:
                self._unlabelled["task"] += 1
            task = OTHER
        counts = self._counts.get((known, task))
        if counts is None:
            counts = self._counts[known, task] = _TaskCounts()
        return counts

    def _new_step(self, counts: _TaskCounts, name: str) -> list[float]:
        if len(counts.steps) >= MAX_STEPS or self._steps >= MAX_ALL_STEPS:
            self._unlabelled["step"] += 1
            name = OTHER
        numbers = counts.steps.get(name)
        if numbers is None:
            self._steps += 1
            numbers = counts.steps[name] = _histogram()
        return numbers

    def _note(self, error: Exception) -> None:
        self._errors += 1
        now = RUNTIME.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET
            logger.opt(exception=error).warning("could not count what a run did; its task is not affected")
