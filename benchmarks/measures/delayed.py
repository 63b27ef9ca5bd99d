"""Lateness of delayed tasks: from the due time to the first line of the handler in an idle worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import quantiles

from perdure import Producer

from ..raw import limits as raw_limits
from ..raw.client import RawClient
from ..sizes import Size
from ..support.deployment import Deployment
from ..support.processes import Child, started
from .measure import Figure, Line, Measure

__all__ = ["DUE"]

_DELAYS = (0.05, 0.11, 0.23, 0.37)
"""Seconds, none a multiple of another."""

_REPORTED_WITHIN = 10.0


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    late, raw = await _perdure(deployment, size.delays), await _raw(deployment, size.delays)
    return {"due_p50": Figure(late[49], raw[49]), "due_p99": Figure(late[98], raw[98])}


async def _perdure(deployment: Deployment, count: int) -> list[float]:
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment) as worker,
    ):

        async def after(delay: float) -> float:
            asked = time.monotonic()
            await producer.enqueue("pick_up", delay=delay, queue="bench")
            return asked + delay

        return await _percentiles(worker, after, count)


async def _raw(deployment: Deployment, count: int) -> list[float]:
    raw_limits.make_group(deployment)
    async with started("benchmarks.raw.reader", deployment) as reader:
        with RawClient(deployment.url) as client:

            async def after(delay: float) -> float:
                due = time.monotonic() + delay
                await asyncio.sleep(delay)
                raw_limits.add_message(client, deployment)
                return due

            return await _percentiles(reader, after, count)


async def _percentiles(child: Child, after: Callable[[float], Awaitable[float]], count: int) -> list[float]:
    """Return milliseconds from the due time, computed before the task is sent, to the child's report of its start."""
    late = []
    for number in range(count):
        due = await after(_DELAYS[number % len(_DELAYS)])
        late.append((await child.reported(_REPORTED_WITHIN) - due) * 1000)
    return quantiles(late, n=100, method="inclusive")


_LIMIT = "a timer, then XADD to a blocked XREADGROUP"

DUE = Measure(
    "due",
    [
        Line("due_p50", "due time to handler start, p50", "ms", _LIMIT),
        Line("due_p99", "due time to handler start, p99", "ms", _LIMIT),
    ],
    _round,
)
