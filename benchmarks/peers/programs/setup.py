"""Settings that the harness passes to the programs, the same for every project."""

from __future__ import annotations

import logging
import os

from .time_file import TimeFile

__all__ = [
    "CHILDREN",
    "CONCURRENCY",
    "DATABASE_URL",
    "NAP",
    "POLL",
    "PREFETCH",
    "RECOVERY",
    "REDIS_URL",
    "SIMPLE",
    "TIMES",
    "UVLOOP",
]

NAP = 0.010
"""Seconds of `nap`."""

CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "32"))
"""Tasks that a worker runs at once."""

CHILDREN = int(os.environ.get("BENCH_CHILDREN", "1000"))
"""Tasks that `spread` enqueues and waits for."""

RECOVERY = float(os.environ["BENCH_RECOVERY"]) if "BENCH_RECOVERY" in os.environ else None
"""Seconds of silence after which a worker counts as dead; None for the project's default."""

POLL = float(os.environ["BENCH_POLL"]) if "BENCH_POLL" in os.environ else None
"""Seconds between two looks for tasks; None for the project's default."""

PREFETCH = int(os.environ["BENCH_PREFETCH"]) if "BENCH_PREFETCH" in os.environ else None
"""Tasks that are fetched before a slot is free; None for the project's default."""

UVLOOP = "BENCH_UVLOOP" in os.environ
"""Whether the worker's own setting for uvloop is on."""

SIMPLE = "BENCH_SIMPLE" in os.environ
"""Whether the simpler of two workers runs."""

REDIS_URL = os.environ.get("BENCH_REDIS_URL", "redis://127.0.0.1:6379/0")
DATABASE_URL = os.environ.get("BENCH_DATABASE_URL", "")

TIMES = TimeFile.from_environment()

# Some projects log a line per task by default: off for all.
logging.disable(logging.INFO)
