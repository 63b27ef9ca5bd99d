"""The machine, time and command of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from ..support.origin import commit_of_tree, processor
from .servers import postgres_version, redis_version

__all__ = ["about"]


def about(options: Sequence[str], *, note: str) -> dict[str, object]:
    """Return the facts for the head of the page. options: command-line options that change the benchmarks."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(options),
        "note": note,
        "revision": commit_of_tree(),
        "machine": {
            "cores": os.cpu_count(),
            "processor": processor(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "redis": redis_version(),
            "postgres": postgres_version(),
            "load_before": round(os.getloadavg()[0], 2),
        },
    }
