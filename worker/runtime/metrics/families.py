"""The table of metrics that a worker or a supervisor exposes: names, labels, buckets, and bounds.

A count is kept under its name and its label values; its value is a list of numbers that only grow: one for a counter,
the sum and one number per bucket for a histogram. So counts of several workers are summed position by position, and a
reader in another thread sees each number as it was at some time, never a smaller one later.

Labels are bounded: queues are those of the worker, tasks those of its app, reasons and outcomes are enumerations. Steps
have the names that the code gives them, without counters and scopes; beyond the bounds, they count as `other`. No id,
key or argument is a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Key: TypeAlias = tuple[str, ...]
"""Name of a metric, and the values of its labels."""

OTHER: Final = "other"
"""Label value of what has no label of its own."""

BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0,
    86_400.0,
)  # fmt: skip
"""Upper bounds of the buckets of all histograms in seconds, from steps of a millisecond to runs of a day."""

MAX_TASKS: Final = 300
"""Largest number of tasks with labels of their own, of each worker; one task on two queues counts twice."""

MAX_STEPS: Final = 100
"""Largest number of steps with labels of their own, of each task."""

MAX_ALL_STEPS: Final = 600
"""The same for all tasks of a worker: a page of a thousand histograms takes about 0.4 s of a core."""

MAX_SERIES: Final = 3_000
"""Largest number of label sets of a supervisor, beyond which tasks and steps count as `other`."""

Kind = Literal["counter", "histogram", "gauge"]

Together = Literal["sum", "max", "min"]
"""Function by which the gauges of several workers become one."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. together: of a gauge, see `Together`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    together: Together = "sum"

    @property
    def numbers(self) -> int:
        """Number of numbers in a count of it."""
        return len(BUCKETS) + 2 if self.kind == "histogram" else 1


RUNS: Final = "perdure_task_runs_total"
WAITS: Final = "perdure_task_wait_seconds"
RAN: Final = "perdure_task_run_seconds"
STEPS: Final = "perdure_step_seconds"
STEP_RETRIES: Final = "perdure_step_retries_total"
DEAD: Final = "perdure_task_dead_letters_total"
CRASHES: Final = "perdure_task_crashes_total"
LIMITS: Final = "perdure_limit_waits_total"
REDIS_AWAY: Final = "perdure_redis_unavailable_seconds_total"
UNLABELLED: Final = "perdure_metrics_other_total"
ERRORS: Final = "perdure_metrics_errors_total"
CHILD_CRASHES: Final = "perdure_supervisor_crashes_total"

WORKERS: Final = "perdure_workers"
READY: Final = "perdure_workers_ready"
SLOTS: Final = "perdure_worker_slots"
SLOTS_USABLE: Final = "perdure_worker_slots_usable"
SLOTS_USED: Final = "perdure_worker_slots_used"
LAG: Final = "perdure_worker_loop_lag_seconds"
MARGIN: Final = "perdure_worker_lease_margin_ratio"
MEMORY: Final = "perdure_worker_memory_bytes"
PAUSED: Final = "perdure_supervisor_paused"
PROCESSES: Final = "perdure_supervisor_processes"
SPARE: Final = "perdure_supervisor_spare"

_OF_TASKS: Final = ("queue", "task")

FAMILIES: Final = {
    family.name: family
    for family in (
        Family(RUNS, "counter", "Runs of tasks that have ended, by their outcome.", (*_OF_TASKS, "outcome")),
        Family(WAITS, "histogram", "Time from when a task was queued until its run began.", _OF_TASKS),
        Family(RAN, "histogram", "Duration of runs, whatever their outcome.", _OF_TASKS),
        Family(STEPS, "histogram", "Duration of steps that were called, with all their tries.", (*_OF_TASKS, "step")),
        Family(STEP_RETRIES, "counter", "Tries of steps after the first one.", _OF_TASKS),
        Family(DEAD, "counter", "Tasks that became dead letters, by the reason.", (*_OF_TASKS, "reason")),
        Family(CRASHES, "counter", "Deliveries whose former worker ended without an outcome.", _OF_TASKS),
        Family(LIMITS, "counter", "Runs that did not begin or go on because a limit had no room.", ("limit",)),
        Family(REDIS_AWAY, "counter", "Time for which workers did not reach Redis, in seconds."),
        Family(UNLABELLED, "counter", "Observations without a label of their own: it has too many values.", ("label",)),
        Family(ERRORS, "counter", "Observations that could not be counted."),
        Family(CHILD_CRASHES, "counter", "Worker processes that ended by a signal or an error.", ("role",)),
        Family(WORKERS, "gauge", "Worker processes that run, by their role.", ("role",)),
        Family(READY, "gauge", "Worker processes that are ready."),
        Family(SLOTS, "gauge", "Slots of the workers: tasks that may run at once."),
        Family(SLOTS_USABLE, "gauge", "Slots that may be filled now, by memory and the lag of the event loop."),
        Family(SLOTS_USED, "gauge", "Slots in use."),
        Family(LAG, "gauge", "Greatest lag of an event loop in the last minute, in seconds.", (), "max"),
        Family(MARGIN, "gauge", "Least part of a lease that was left at a renewal in the last minute.", (), "min"),
        Family(MEMORY, "gauge", "Resident memory of the worker processes in bytes."),
        Family(PAUSED, "gauge", "Whether the supervisor is paused after too many crashes."),
        Family(PROCESSES, "gauge", "Worker processes that the supervisor is to keep running."),
        Family(SPARE, "gauge", "Whether a process is ready to take the place of a worker that crashes."),
    )
}  # fmt: skip
"""All metrics, by name."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Counts, and what gauges show now.

    Attributes:
        namespace: label of all metrics.
        counts: numbers by metric and labels; see above.
        gauges: values by metric and labels.
    """

    namespace: str
    counts: dict[Key, list[float]]
    gauges: dict[Key, float]
