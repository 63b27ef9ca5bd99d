"""Intervals and time limits of child processes and of their supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupervisorTimings:
    """Intervals and time limits of a supervisor, in seconds.

    Args:
        register_interval: between two registrations in Redis; a lifted pause takes effect after at most this time.
        registration_ttl: after which a supervisor that no longer registers counts as gone.
        start_limit: for a child to get ready or to end. Importing an app may be slow.
        stop_margin: that a stopping child has beyond the app's grace, to release its tasks and exit.
        abort_limit: that a stalled child has to write its stacks to the log after SIGABRT.
        final_reports: during a drain, to report crashes to Redis. Later, tasks wait for their lease.
        last_reply: for Redis to answer when the supervisor deregisters. Later, its registration expires.
        shortest_run: of a child. One that exits sooner is replaced after this delay, even after exit code 0.
        burst_poll: between two checks whether the quarantined tasks of a burst are done.
        idle_limit: after which a quarantine child without a task is terminated.
        idle_poll: between two checks for idle quarantine children.
        heartbeat_interval: between two heartbeats of a healthy child, and between two checks of the stall monitor.
        heartbeat_limit: without a heartbeat, after which a child is reported as not alive.
        frozen_after: since the last check of the stall monitor if the supervisor itself was frozen; at most half of the
            stall limit.
        alert_limit: for the alert command.
    """

    register_interval: float = 1.5
    registration_ttl: float = 15.0
    start_limit: float = 600.0
    stop_margin: float = 10.0
    abort_limit: float = 2.0
    final_reports: float = 5.0
    last_reply: float = 1.0
    shortest_run: float = 1.0
    burst_poll: float = 0.2
    idle_limit: float = 60.0
    idle_poll: float = 5.0
    heartbeat_interval: float = 1.0
    heartbeat_limit: float = 5.0
    frozen_after: float = 5.0
    alert_limit: float = 30.0


def delay_after(failures: int, delays: Sequence[float]) -> float:
    """Return the delay after a number of failures in a row: the first, second and so on; the last one repeats."""
    return delays[min(failures, len(delays)) - 1] if failures > 0 else 0.0
