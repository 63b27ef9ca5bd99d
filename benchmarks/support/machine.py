"""The event loop of the benchmarks, and a line that describes the machine."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
from collections.abc import Coroutine
from importlib.metadata import version
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["machine_line", "run"]

R = TypeVar("R")

uvloop: ModuleType | None
try:
    import uvloop
except ImportError:
    uvloop = None


def run(main: Coroutine[Any, Any, R]) -> R:
    """Run as `perdure worker run` does: on uvloop if it is installed, with loaded modules excluded from collection."""
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


def machine_line() -> str:
    """Return cores, Python, event loop, client, and the load average if the system has one."""
    loop = f"uvloop {version('uvloop')}" if uvloop else "asyncio loop"
    parts = [
        f"{os.cpu_count()} cores",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        loop,
        f"redis-py {version('redis')} with hiredis {version('hiredis')}",
    ]
    if hasattr(os, "getloadavg"):
        parts.append(f"load {os.getloadavg()[0]:.1f} before")
    return ", ".join(parts)
