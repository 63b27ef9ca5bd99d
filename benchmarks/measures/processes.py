"""Memory of the processes of a worker while they are idle."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

import psutil
from perdure import Producer
from perdure.queues.supervisors import list_supervisors

from ..sizes import Size
from ..support.deployment import Deployment
from ..support.processes import ROOT, started
from .measure import Figure, Line, Measure

__all__ = ["PROCESSES"]

_READY_WITHIN = 60.0
_LOOK = 0.1
_MEGABYTE = 1e6


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    async with started("benchmarks.support.worker_process", deployment) as worker:
        idle = _memory(worker.pid)
    bare = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print(flush=True); input()", stdin=PIPE, stdout=PIPE
    )
    try:
        assert bare.stdout is not None
        await bare.stdout.readline()
        limit = _memory(bare.pid)
    finally:
        bare.kill()
        await bare.wait()
    return {"idle_memory": Figure(idle, limit), "run_memory": Figure(await _supervised(deployment), limit)}


async def _supervised(deployment: Deployment) -> float:
    """Return the memory of `perdure worker run` with its worker and its spare."""
    program = ("-m", "perdure.worker.cli", "worker", "run", "benchmarks.support.worker_process:app")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, env=deployment.environment, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        await _until_idle(deployment, process)
        return _memory(process.pid) + sum(_memory(child.pid) for child in psutil.Process(process.pid).children(True))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_idle(deployment: Deployment, process: Process) -> None:
    """Wait until the worker works and the spare has loaded the app."""
    async with asyncio.timeout(_READY_WITHIN), Producer(deployment.url, namespace=deployment.namespace) as producer:
        while process.returncode is None:
            for supervisor in await list_supervisors(producer.gateway, producer.namespace):
                if {(child.role, child.state) for child in supervisor.children} == {
                    ("worker", "working"),
                    ("spare", "idle"),
                }:
                    return
            await asyncio.sleep(_LOOK)
    raise RuntimeError(f"'perdure worker run' ended with exit code {process.returncode}")


def _memory(pid: int) -> float:
    """Return the memory of a process in megabytes; on Linux its share of what several have (PSS)."""
    found = psutil.Process(pid).memory_full_info()
    return float(getattr(found, "pss", found.uss)) / _MEGABYTE


_LIMIT = "an idle interpreter"

PROCESSES = Measure(
    "processes",
    [
        Line("idle_memory", "memory of an idle worker process", "MB", _LIMIT),
        Line("run_memory", "memory of an idle `perdure worker run`, three processes", "MB", _LIMIT),
    ],
    _round,
)
