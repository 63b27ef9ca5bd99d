"""Stall monitor: ends children that stopped responding. Also the combined health of all children."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from ....queues.runtime import RUNTIME
from ...log import logger
from ..health.report import ALIVE, CONNECTED, CombinedReport, Level, Report
from .child import Child
from .timings import SupervisorTimings


class StallMonitor:
    """Periodic check of all children.

    A healthy child sends a heartbeat every second that says for how long its event loop has not responded. A child
    whose loop lags for longer than the limit, or that sends nothing for so long (its interpreter is stuck in C code),
    dumps its stacks and is killed. Children that were requested to stop have a time limit of their own.

    Args:
        limit: Seconds.
    """

    def __init__(self, children: Iterable[Child], limit: float, timings: SupervisorTimings) -> None:
        self._children = children
        self._limit = limit
        self._timings = timings
        self._frozen_after = min(timings.frozen_after, limit / 2)
        self._last_check: float | None = None

    async def run(self) -> None:
        async with anyio.create_task_group() as aborts:
            while True:
                for child in self.find_stalled(RUNTIME.monotonic()):
                    aborts.start_soon(child.abort, "stalled", self._timings.abort_limit)
                await anyio.sleep(min(self._timings.heartbeat_interval, self._limit / 4))

    def find_stalled(self, now: float) -> list[Child]:
        """Return the children that stopped responding, and log them."""
        if self._last_check is not None and now - self._last_check > self._frozen_after:
            self._restart_clocks(now)
        self._last_check = now
        return [child for child in self._children if self._is_stalled(child, now)]

    def _restart_clocks(self, now: float) -> None:
        """Discard the silence of all children: this process was frozen, and could not read their heartbeats."""
        for child in self._children:
            if child.last_heartbeat is not None:
                child.last_heartbeat = now

    def _is_stalled(self, child: Child, now: float) -> bool:
        if child.last_heartbeat is None or child.stalled or child.stop_requests or child.exited.is_set():
            return False
        silent = now - child.last_heartbeat
        if max(child.loop_lag, silent) <= self._limit:
            return False
        logger.error(
            "worker {} (process {}) stalled: {} for {:.0f} s; dumping its stacks, then killing it",
            child.worker,
            child.pid,
            "event loop did not respond" if child.loop_lag > self._limit else "no heartbeat",
            max(child.loop_lag, silent),
        )
        return True


def health_of(children: Iterable[Child], heartbeat_limit: float) -> CombinedReport:
    """Return the health of all children that were not requested to stop. Thread-safe.

    Args:
        heartbeat_limit: Seconds without a heartbeat, after which a child is not alive.
    """
    reports = [
        (child.role, _report(child, heartbeat_limit))
        for child in children
        if not child.stop_requests and not child.exited.is_set()
    ]
    return CombinedReport(
        [report for role, report in reports if role == "worker"],
        [report for role, report in reports if role == "isolated"],
    )


def _report(child: Child, heartbeat_limit: float) -> Report:
    name = child.worker or f"process {child.pid}"
    silent = 0.0 if child.last_heartbeat is None else RUNTIME.monotonic() - child.last_heartbeat
    if silent > heartbeat_limit:
        remedy = "its interpreter is stuck; the supervisor replaces it after the stall limit"
        return Report(name, (Level(ALIVE, False, f"no heartbeat for {silent:.0f} s", remedy),))
    if not child.health:
        return Report(name, (Level(CONNECTED, False, "it is still starting"),))
    try:
        return Report.from_summary(child.health)
    except (KeyError, TypeError):
        return Report(name, (Level(ALIVE, True, "it sends no health report"),))
