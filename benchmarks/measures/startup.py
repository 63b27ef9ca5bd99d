"""Time from the start of a process until it is usable."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping

from ..sizes import Size
from ..support.deployment import Deployment
from ..support.processes import started
from .measure import Figure, Line, Measure

__all__ = ["STARTUP"]


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    bare = await _milliseconds("-c", "pass")
    return {
        "import": Figure(await _milliseconds("-c", "import perdure"), bare),
        "help": Figure(await _milliseconds("-m", "perdure.worker.cli", "--help"), bare),
        "task_list": Figure(await _milliseconds(*_TASK_LIST, environment=deployment.environment), bare),
        "ready": Figure(await _ready(deployment), bare),
    }


_TASK_LIST = ("-m", "perdure.worker.cli", "task", "list")


async def _milliseconds(*command: str, environment: Mapping[str, str] | None = None) -> float:
    """Return the time until the process has exited."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=DEVNULL, stderr=DEVNULL, env=environment
    )
    if await process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    return (time.perf_counter() - began) * 1000


async def _ready(deployment: Deployment) -> float:
    """Return the time until a worker has joined its consumer groups and reads."""
    began = time.perf_counter()
    async with started("benchmarks.support.worker_process", deployment):
        return (time.perf_counter() - began) * 1000


_LIMIT = "an idle interpreter"

STARTUP = Measure(
    "startup",
    [
        Line("import", "import perdure", "ms", _LIMIT),
        Line("help", "perdure --help", "ms", _LIMIT),
        Line("task_list", "perdure task list", "ms", _LIMIT),
        Line("ready", "process start until the worker reads", "ms", _LIMIT),
    ],
    _round,
)
