"""The sizes of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perdure import Settings

__all__ = ["FULL", "QUICK", "Size"]


@dataclass(frozen=True, slots=True)
class Backlog:
    """Waiting tasks: queued, due in an hour, dead letters."""

    queued: int
    due: int
    dead: int


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run: counts per round, leases in seconds.

    tasks: no-op tasks run, and tasks enqueued one by one. bulk: tasks enqueued by one call. steps: durable steps of one
    task. shared_steps: durable steps of all concurrent tasks together. pick_ups: tasks sent to an idle worker. delays:
    delayed tasks. lease, short_lease: of killed workers. backlog, small_backlog: the two that are compared.
    backlog_samples: measurements of each operation. expired: tasks that run and expire. kills: of a supervised worker,
    per round.
    """

    rounds: int
    tasks: int
    bulk: int
    steps: int
    shared_steps: int
    pick_ups: int
    delays: int
    lease: float
    short_lease: float
    backlog: Backlog
    small_backlog: Backlog
    backlog_samples: int
    expired: int
    kills: int


FULL: Final = Size(
    rounds=5,
    tasks=10_000,
    bulk=50_000,
    steps=5_000,
    shared_steps=16_000,
    pick_ups=1_000,
    delays=40,
    lease=Settings.model_fields["lease"].default,
    short_lease=1.0,
    backlog=Backlog(1_000_000, 100_000, 100_000),
    small_backlog=Backlog(10_000, 1_000, 1_000),
    backlog_samples=500,
    expired=1_000_000,
    kills=4,
)

QUICK: Final = Size(
    rounds=1,
    tasks=320,
    bulk=640,
    steps=100,
    shared_steps=320,
    pick_ups=100,
    delays=8,
    lease=1.2,
    short_lease=1.0,
    backlog=Backlog(2_000, 100, 100),
    small_backlog=Backlog(200, 50, 50),
    backlog_samples=20,
    expired=500,
    kills=1,
)
"""Only checks that everything runs; its figures are meaningless."""
