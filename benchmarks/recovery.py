"""Time from the death of a worker process until another, idle one runs its step again.

`python -m benchmarks.recovery` measures hosts with supervisors: a killed worker, a lost host, a deploy.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated

import typer
from perdure import Producer, Settings
from perdure.queues import Namespace
from perdure.queues.keys import GROUP

from .measures.measure import Figure, Line, Measure
from .raw.client import RawClient
from .sizes import Size
from .support.deployment import Deployment
from .support.host import host
from .support.machine import origin_line, run
from .support.processes import started
from .support.server import own_server, server_line

__all__ = ["SUPERVISED", "recovery"]

_STARTED_WITHIN = 20.0

_AT_ONCE = 2
"""Rounds that run concurrently, because they mostly wait."""


def recovery(key: str, lease: float, *, at_once: bool) -> Measure:
    """Return the benchmark for a lease of `lease` seconds."""

    async def round_(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
        return {key: await _kill(replace(deployment, lease=lease), lease)}

    line = Line(key, f"kill -9 until the step runs again, lease {lease:g} s", "s", "the rest of the lease")
    return Measure(key, [line], round_, at_once)


async def _kill(deployment: Deployment, lease: float) -> Figure:
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment) as victim,
    ):
        await producer.enqueue("hang", queue="bench")
        await victim.reported(_STARTED_WITHIN)
        async with started("benchmarks.support.worker_process", deployment) as rescuer:
            # Leases are renewed every third of a lease and swept about every half: kill at a random time.
            await asyncio.sleep(lease * random.uniform(0.5, 1.0))
            left = lease - _silence(deployment)
            killed = victim.send(signal.SIGKILL)
            return Figure(await rescuer.reported(4 * lease + _STARTED_WITHIN) - killed, left)


async def _supervised(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    found = await supervised_kills(replace(deployment, lease=size.lease), size.kills)
    return {"recovery_supervised": Figure(statistics.median(found), size.lease)}


SUPERVISED = Measure(
    "recovery_supervised",
    [Line("recovery_supervised", "kill -9 until the task runs again, under a supervisor", "s", "the lease")],
    _supervised,
)


async def supervised_kills(deployment: Deployment, times: int) -> list[float]:
    """Return the seconds from the death of a supervised worker until its task runs again, for several tasks."""
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        host("first", deployment, producer) as first,
    ):
        found: list[float] = []
        for _ in range(times):
            await first.complete()
            task = await producer.enqueue("hang_once", queue="bench")
            await first.reported(_STARTED_WITHIN)
            killed = await first.kill_worker_of(task)
            found.append(await first.reported(_STARTED_WITHIN) - killed)
        return found


async def host_lost(deployment: Deployment) -> float:
    """Return the seconds from the death of all processes of a host until its task runs on another host."""
    lease = deployment.lease or Settings.model_fields["lease"].default
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        host("first", deployment, producer) as first,
    ):
        await producer.enqueue("hang_once", queue="bench")
        await first.reported(_STARTED_WITHIN)
        async with host("second", deployment, producer) as second:
            await asyncio.sleep(lease * random.uniform(0.5, 1.0))
            lost = await first.lose()
            return await second.reported(4 * lease + _STARTED_WITHIN) - lost


async def deploy(deployment: Deployment) -> float:
    """Return the seconds from SIGTERM until the task runs on another host; up to `PACE` of them is its step."""
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        host("first", deployment, producer) as first,
    ):
        await producer.enqueue("pace", queue="bench")
        await first.reported(_STARTED_WITHIN)
        async with host("second", deployment, producer) as second:
            await asyncio.sleep(random.uniform(0.2, 0.4))
            stopped = first.stop()
            return await second.reported(_STARTED_WITHIN) - stopped


def _silence(deployment: Deployment) -> float:
    """Return the seconds since the only lease was renewed."""
    ready = Namespace(deployment.namespace).partition("bench").ready
    with RawClient(deployment.url) as client:
        pending = client.call("XPENDING", ready, GROUP, "-", "+", 1)
    return int(pending[0][2]) / 1000


async def _measure_all(deployment: Deployment, times: int) -> list[tuple[str, list[float]]]:
    return [
        ("a supervised worker is killed", await supervised_kills(deployment.within("killed"), times)),
        ("a host is lost", await _concurrently(deployment.within("lost"), host_lost, times)),
        (
            "a deploy: SIGTERM, another host takes over",
            await _concurrently(deployment.within("deploy"), deploy, times, 1),
        ),
    ]


async def _concurrently(
    deployment: Deployment, measure: Callable[[Deployment], Awaitable[float]], times: int, at_once: int = _AT_ONCE
) -> list[float]:
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> float:
        async with room:
            return await measure(deployment.within(str(number)))

    return await asyncio.gather(*map(one, range(times)))


def main(times: Annotated[int, typer.Option(min=1, help="Repetitions of each benchmark.")] = 20) -> None:
    """Print the time until a task runs again with the default lease: median and worst."""
    with own_server(fsync=False) as deployment:
        print(origin_line(server_line(deployment)))
        found = run(_measure_all(deployment, times))
    print(f"\nseconds until the task runs again, {times} times   {'median':>8} {'worst':>8}")
    for what, seconds in found:
        print(f"{what:47} {statistics.median(seconds):8.3f} {max(seconds):8.3f}")


if __name__ == "__main__":
    typer.run(main)
