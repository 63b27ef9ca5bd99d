"""Perdure's performance targets, and the benchmark that measures each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TARGETS", "Target"]

Run = Literal["own", "fsync", "peers"]


@dataclass(frozen=True, slots=True)
class Target:
    """One target. at_least, at_most: the bound, one of the two. run, key: where its figure is.

    run: `own` is `python -m benchmarks`, `fsync` the same with `--fsync`, `peers` the factor to the best peer in
    `python -m benchmarks.peers`. A target whose key is in no run is shown as not measured. ratio: the bound applies to
    the ratio to the raw client or the small backlog, not to the figure itself.
    """

    what: str
    unit: str
    run: Run
    key: str
    at_least: float | None = None
    at_most: float | None = None
    ratio: bool = False


_BACKLOG = "with a backlog of 1,000,000, as a multiple of the time with 10,000"

TARGETS: Sequence[Target] = (
    Target("no-op tasks, one worker, concurrency 32, result kept", "tasks/s", "own", "throughput", at_least=20_000),
    Target("the same, as a multiple of the best peer at its best setting", "times", "peers", "noop", at_least=8),
    Target("enqueue, awaited one by one by 32 coroutines", "tasks/s", "own", "enqueue", at_least=30_000),
    Target("enqueue, one bulk call", "tasks/s", "own", "enqueue_bulk", at_least=150_000),
    Target("durable steps, one task", "steps/s", "own", "steps", at_least=8_000),
    Target("the same, as a share of the raw client", "of it", "own", "steps", at_least=0.75, ratio=True),
    Target("durable steps, 32 tasks", "steps/s", "own", "steps_shared", at_least=30_000),
    Target("the same, as a share of the raw client", "of it", "own", "steps_shared", at_least=0.8, ratio=True),
    Target("durable steps, one task, fsync on every write", "steps/s", "fsync", "steps", at_least=2_000),
    Target("durable steps, 32 tasks, fsync on every write", "steps/s", "fsync", "steps_shared", at_least=20_000),
    Target("the same, as a share of the raw client", "of it", "fsync", "steps_shared", at_least=0.8, ratio=True),
    Target("enqueue to handler start, idle worker, p50", "ms", "own", "pick_up_p50", at_most=1),
    Target("enqueue to handler start, idle worker, p99", "ms", "own", "pick_up_p99", at_most=3),
    Target("due time to handler start, p99", "ms", "own", "due_p99", at_most=50),
    Target("import perdure", "ms", "own", "import", at_most=150),
    Target("perdure --help", "ms", "own", "help", at_most=400),
    Target("perdure task list", "ms", "own", "task_list", at_most=250),
    Target("start of a worker until it reads", "ms", "own", "ready", at_most=600),
    Target("kill -9 until the task runs again, host lost, lease 15 s", "s", "own", "recovery", at_most=20),
    Target("kill -9 until the task runs again, under a supervisor", "s", "own", "recovery_supervised", at_most=1),
    Target(f"enqueue {_BACKLOG}", "times", "own", "backlog_enqueue", at_most=1.1, ratio=True),
    Target("the same for a read", "times", "own", "backlog_read", at_most=1.1, ratio=True),
    Target("the same for settling", "times", "own", "backlog_settle", at_most=1.1, ratio=True),
    Target("the same for promoting a due task", "times", "own", "backlog_promote", at_most=1.1, ratio=True),
    Target("the same for `dlq list --limit 20`", "times", "own", "backlog_dlq_list", at_most=1.1, ratio=True),
    Target("the same for `queue list`", "times", "own", "backlog_queue_list", at_most=1.1, ratio=True),
    Target("memory of an idle worker process", "MB", "own", "idle_memory", at_most=40),
    Target("memory of an idle `perdure worker run`, three processes", "MB", "own", "run_memory", at_most=80),
    Target(
        "memory of Redis after 1,000,000 tasks have expired, as a multiple of before",
        "times",
        "own",
        "expired_memory",
        at_most=1.1,
    ),
)
