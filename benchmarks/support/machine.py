"""The event loop of the benchmarks, and the line that states the origin of their figures."""

from __future__ import annotations

import asyncio
import gc
import shlex
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from types import ModuleType
from typing import Any, TypeVar

from .origin import Origin

__all__ = ["origin_line", "run"]

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


def origin_line(*servers: str) -> str:
    """Return the line that stands beside the figures of this process in a document. servers: a line for each."""
    command = shlex.join(["python", *sys.orig_argv[1:]])
    loop = f"uvloop {version('uvloop')}" if uvloop else "asyncio loop"
    client = f"redis-py {version('redis')} with hiredis {version('hiredis')}"
    return Origin.now(command, loop, client, *servers).line()
