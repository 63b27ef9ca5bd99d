"""Health of a worker: loop watchdog, deadlines, report and probe server."""

from __future__ import annotations

from .deadlines import RunDeadlines
from .loop_watchdog import LoopWatchdog
from .report import ALIVE, CONNECTED, LEVELS, CombinedReport, Health, Level, Report

__all__ = [
    "ALIVE",
    "CONNECTED",
    "LEVELS",
    "CombinedReport",
    "Health",
    "Level",
    "LoopWatchdog",
    "Report",
    "RunDeadlines",
]
