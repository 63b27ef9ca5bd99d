"""Support for tests of an app: run its tasks, let days pass in milliseconds, or call one handler without a server.

The fixtures `perdure`, `perdure_clock` and `perdure_server` come from the pytest plugin `perdure`.
"""

from .worker.testing.clock import PerdureClock
from .worker.testing.crashes import CrashComparison, CrashProblem, crash_at, crash_everywhere, record_effect
from .worker.testing.enqueued import assert_enqueued, refute_enqueued
from .worker.testing.fixture import PerdureFixture
from .worker.testing.idle import drain, run_until_idle, run_worker
from .worker.testing.log_replay import ReplayedLog, replay_log
from .worker.testing.unit_context import UnitContext, make_context

__all__ = [
    "CrashComparison",
    "CrashProblem",
    "PerdureClock",
    "PerdureFixture",
    "ReplayedLog",
    "UnitContext",
    "assert_enqueued",
    "crash_at",
    "crash_everywhere",
    "drain",
    "make_context",
    "record_effect",
    "refute_enqueued",
    "replay_log",
    "run_until_idle",
    "run_worker",
]
