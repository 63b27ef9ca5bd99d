"""Intervals and time limits of a worker that no setting changes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerTimings"]


@dataclass(frozen=True)
class WorkerTimings:
    """Intervals and time limits of a worker, in seconds.

    Args:
        release_limit: that cancelled runs have to release their tasks.
        handler_poll: between two checks whether cancelled handlers have ended.
        last_reply: for the replies of Redis while the worker stops.
        sweep_interval: between two sweeps for pending messages, at most: the tasks of a lost host resume within
            lease + 5 s.
        clean_interval: between two rounds of one janitor.
        clean_lock: between two rounds in the fleet, at least: less than the shortest sleep of one janitor.
    """

    release_limit: float = 5.0
    handler_poll: float = 0.02
    last_reply: float = 1.0
    sweep_interval: float = 3.0
    clean_interval: float = 60.0
    clean_lock: float = 25.0
