"""Time from SIGTERM to one worker until another, idle worker process resumes its task."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Mapping

from perdure import Producer

from ..raw import limits as raw_limits
from ..raw.client import RawClient
from ..sizes import Size
from ..support.deployment import Deployment
from ..support.processes import started
from ..support.worker_process import TICK
from .measure import Figure, Line, Measure

__all__ = ["RELEASE"]

_STARTED_WITHIN = 10.0
_RAW_TIMES = 20


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    return {"release": Figure(await _perdure(deployment), await _raw(deployment))}


async def _perdure(deployment: Deployment) -> float:
    """Return milliseconds. They include up to one step, which the stopping worker finishes first."""
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment) as stopping,
    ):
        await producer.enqueue("tick", queue="bench")
        await stopping.reported(_STARTED_WITHIN)
        async with started("benchmarks.support.worker_process", deployment) as next_one:
            await asyncio.sleep(random.uniform(0.2, 0.4))
            stopped = stopping.send(signal.SIGTERM)
            return (await next_one.reported(_STARTED_WITHIN) - stopped) * 1000


async def _raw(deployment: Deployment) -> float:
    """Return milliseconds, the median of several repetitions with the same reader."""
    raw_limits.make_group(deployment)
    with RawClient(deployment.url) as client:
        raw_limits.add_message(client, deployment)
        entry = raw_limits.take_message(client, deployment)
        async with started("benchmarks.raw.reader", deployment) as reader:
            found = []
            for _ in range(_RAW_TIMES):
                await asyncio.sleep(0.01)
                began = time.monotonic()
                raw_limits.release(client, deployment, entry)
                found.append((await reader.reported(_STARTED_WITHIN) - began) * 1000)
            return statistics.median(found)


RELEASE = Measure(
    "release",
    [
        Line(
            "release",
            f"SIGTERM until another worker resumes, {TICK * 1000:g} ms steps",
            "ms",
            "XCLAIM + XADD, XREADGROUP + XAUTOCLAIM",
        )
    ],
    _round,
)
