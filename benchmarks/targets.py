"""What Perdure is to reach, row by row, and where each figure is found. The design fixed them; benchmarks tell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TARGETS", "Target"]

Run = Literal["own", "fsync", "peers"]


@dataclass(frozen=True, slots=True)
class Target:
    """One row. at_least, at_most: the bound, of which one is given. run, key: the figure's place.

    run: `own` is `python -m benchmarks`, `fsync` the same with `--fsync`, `peers` how many times better than the best
    peer in `python -m benchmarks.peers`. A row whose key is in no run is shown as not measured. ratio: the bound is not
    for the figure but for its ratio to what stands beside it.
    """

    what: str
    unit: str
    run: Run
    key: str
    at_least: float | None = None
    at_most: float | None = None
    ratio: bool = False


_BACKLOG = "beside a backlog of 1,000,000, as a multiple of that beside 10,000"

TARGETS: Sequence[Target] = (
    Target("no-op tasks, one replica, concurrency 32, result kept", "tasks/s", "own", "throughput", at_least=20_000),
    Target("the same, as a multiple of the best peer", "times", "peers", "noop", at_least=10),
    Target("enqueue, awaited one by one by 32 coroutines", "tasks/s", "own", "enqueue", at_least=30_000),
    Target("enqueue, one bulk call", "tasks/s", "own", "enqueue_bulk", at_least=100_000),
    Target("durable steps, one task", "steps/s", "own", "steps", at_least=8_000),
    Target("durable steps, 32 tasks", "steps/s", "own", "steps_shared", at_least=30_000),
    Target("durable steps, one task, fsync on every write", "steps/s", "fsync", "steps", at_least=2_000),
    Target("durable steps, 32 tasks, fsync on every write", "steps/s", "fsync", "steps_shared", at_least=20_000),
    Target("enqueue to handler start, idle worker, p50", "ms", "own", "pick_up_p50", at_most=1),
    Target("enqueue to handler start, idle worker, p99", "ms", "own", "pick_up_p99", at_most=3),
    Target("due time to handler start, p99", "ms", "own", "due_p99", at_most=50),
    Target("import perdure", "ms", "own", "import", at_most=150),
    Target("perdure --help", "ms", "own", "help", at_most=400),
    Target("start of a worker until it is ready", "ms", "own", "ready", at_most=600),
    Target("kill -9 to work resumed, host lost, lease 15 s", "s", "own", "recovery", at_most=20),
    Target("kill -9 to work resumed, under a supervisor", "s", "own", "recovery_supervised", at_most=1),
    Target(f"enqueue {_BACKLOG}", "times", "own", "backlog_enqueue", at_most=1.1, ratio=True),
    Target("the same of a read", "times", "own", "backlog_read", at_most=1.1, ratio=True),
    Target("the same of settling", "times", "own", "backlog_settle", at_most=1.1, ratio=True),
    Target("the same of promoting one that is due", "times", "own", "backlog_promote", at_most=1.1, ratio=True),
    Target("the same of `dlq list --limit 20`", "times", "own", "backlog_dlq_list", at_most=1.1, ratio=True),
    Target("the same of `queue list`", "times", "own", "backlog_queue_list", at_most=1.1, ratio=True),
    Target("memory of an idle replica", "MB", "own", "idle_memory", at_most=80),
    Target("Redis after 1,000,000 tasks have expired, beside its start", "times", "own", "expired_memory", at_most=1.1),
)
