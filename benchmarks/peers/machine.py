"""The machine, time and command of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from .servers import postgres_version, redis_version

__all__ = ["about"]

_ROOT = Path(__file__).parents[2]


def about(options: Sequence[str], *, note: str) -> dict[str, object]:
    """Return the facts for the head of the page. options: command-line options that change the benchmarks."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(options),
        "note": note,
        "revision": _revision(),
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "redis": redis_version(),
            "postgres": postgres_version(),
            "load_before": round(os.getloadavg()[0], 2),
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "?"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


def _revision() -> str:
    """Return the revision of the repository, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "?"
    return done.stdout.strip() or "?"
