"""What the harness told this process, the same for every peer."""

from __future__ import annotations

import logging
import os

from .tape import Tape

__all__ = ["CHILDREN", "CONCURRENCY", "DATABASE_URL", "NAP", "RECOVERY", "REDIS_URL", "TAPE"]

NAP = 0.010
"""Seconds that `nap` waits."""

CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "32"))
"""Tasks that a worker runs at once."""

CHILDREN = int(os.environ.get("BENCH_CHILDREN", "1000"))
"""Tasks that `spread` enqueues and waits for."""

RECOVERY = float(os.environ["BENCH_RECOVERY"]) if "BENCH_RECOVERY" in os.environ else None
"""Seconds of silence after which a worker is taken for dead; None for the peer's own default."""

REDIS_URL = os.environ.get("BENCH_REDIS_URL", "redis://127.0.0.1:6379/0")
DATABASE_URL = os.environ.get("BENCH_DATABASE_URL", "")

TAPE = Tape.from_environment()

# A line of log per task is what some print by default and others do not: off for all, so that nobody pays for it.
logging.disable(logging.INFO)
