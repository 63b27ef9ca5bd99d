"""Latency from the enqueue call to the first line of the handler in another, idle process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping

from perdure import Producer

from ..raw import limits as raw_limits
from ..raw.client import RawClient
from ..sizes import Size
from ..support.deployment import Deployment
from ..support.processes import Child, started
from .measure import Figure, Line, Measure

__all__ = ["LATENCY"]

_IDLE_AGAIN = 0.004
"""Seconds for a worker to settle a task and block on the next read."""

_REPORTED_WITHIN = 10.0
_WARM_UP = 20


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    limit = await _raw(deployment, size.pick_ups)
    found = await _perdure(deployment, size.pick_ups)
    return {
        "pick_up_p50": Figure(_percentile(found, 50), _percentile(limit, 50)),
        "pick_up_p99": Figure(_percentile(found, 99), _percentile(limit, 99)),
    }


async def _perdure(deployment: Deployment, count: int) -> list[float]:
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment) as worker,
    ):
        return await _pick_ups(worker, lambda: producer.enqueue("pick_up", queue="bench"), count)


async def _raw(deployment: Deployment, count: int) -> list[float]:
    raw_limits.make_group(deployment)
    async with started("benchmarks.raw.reader", deployment) as reader:
        with RawClient(deployment.url) as client:

            async def send() -> None:
                raw_limits.add_message(client, deployment)

            return await _pick_ups(reader, send, count)


async def _pick_ups(child: Child, send: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Return milliseconds from each send to the child's report of its start."""
    found = []
    for _ in range(_WARM_UP + count):
        await asyncio.sleep(_IDLE_AGAIN)
        sent = time.monotonic()
        await send()
        found.append((await child.reported(_REPORTED_WITHIN) - sent) * 1000)
    return found[_WARM_UP:]


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


_LIMIT = "XADD to a blocked XREADGROUP"

LATENCY = Measure(
    "latency",
    [
        Line("pick_up_p50", "enqueue to handler start, p50", "ms", _LIMIT),
        Line("pick_up_p99", "enqueue to handler start, p99", "ms", _LIMIT),
    ],
    _round,
)
