"""From the death of a worker process to its step running again in another, which was idle already.

`python -m benchmarks.recovery` is about hosts with supervisors: a worker killed, a host lost, a deploy.
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

from .figures import Figure, Line, Measure
from .host import host
from .machine import machine_line, run
from .place import Place
from .processes import started
from .raw import RawClient
from .server import own_server, server_line
from .size import Size

__all__ = ["SUPERVISED", "recovery"]

_STARTED_WITHIN = 20.0

_AT_ONCE = 2
"""Rounds that mostly wait, so that some of them are played at the same time."""


def recovery(key: str, lease: float, *, at_once: bool) -> Measure:
    """How long it takes with a lease of so many seconds."""

    async def round_(place: Place, size: Size) -> Mapping[str, Figure]:
        return {key: await _kill(replace(place, lease=lease), lease)}

    line = Line(key, f"kill -9 to step running again, lease {lease:g} s", "s", "what was left of the lease")
    return Measure(key, [line], round_, at_once)


async def _kill(place: Place, lease: float) -> Figure:
    async with (
        Producer(place.url, namespace=place.namespace) as producer,
        started("replica", place) as victim,
    ):
        await producer.enqueue("hang")
        await victim.told(_STARTED_WITHIN)
        async with started("replica", place) as rescuer:
            # Beats come every third of a lease and sweeps about every half: fall anywhere between them.
            await asyncio.sleep(lease * random.uniform(0.5, 1.0))
            left = lease - _silence(place)
            killed = victim.send(signal.SIGKILL)
            return Figure(await rescuer.told(4 * lease + _STARTED_WITHIN) - killed, left)


async def _supervised(place: Place, size: Size) -> Mapping[str, Figure]:
    found = await supervised_kills(replace(place, lease=size.lease), size.kills)
    return {"recovery_supervised": Figure(statistics.median(found), size.lease)}


SUPERVISED = Measure(
    "recovery_supervised",
    [Line("recovery_supervised", "kill -9 to task going on, under a supervisor", "s", "the lease")],
    _supervised,
)


async def supervised_kills(place: Place, times: int) -> list[float]:
    """Seconds from the death of a supervised worker to its task going on, for so many tasks."""
    async with (
        Producer(place.url, namespace=place.namespace) as producer,
        host("first", place, producer) as first,
    ):
        found: list[float] = []
        for _ in range(times):
            await first.complete()
            task = await producer.enqueue("hang_once")
            await first.told(_STARTED_WITHIN)
            killed = await first.kill_who_runs(task)
            found.append(await first.told(_STARTED_WITHIN) - killed)
        return found


async def host_lost(place: Place) -> float:
    """Seconds from the death of all processes of a host to its task going on at another one."""
    lease = place.lease or Settings.model_fields["lease"].default
    async with (
        Producer(place.url, namespace=place.namespace) as producer,
        host("first", place, producer) as first,
    ):
        await producer.enqueue("hang_once")
        await first.told(_STARTED_WITHIN)
        async with host("second", place, producer) as second:
            await asyncio.sleep(lease * random.uniform(0.5, 1.0))
            lost = await first.lose()
            return await second.told(4 * lease + _STARTED_WITHIN) - lost


async def deploy(place: Place) -> float:
    """Seconds from SIGTERM to a supervisor to its task going on at another host; up to `PACE` of them is its step."""
    async with (
        Producer(place.url, namespace=place.namespace) as producer,
        host("first", place, producer) as first,
    ):
        await producer.enqueue("pace")
        await first.told(_STARTED_WITHIN)
        async with host("second", place, producer) as second:
            await asyncio.sleep(random.uniform(0.2, 0.4))
            stopped = first.stop()
            return await second.told(_STARTED_WITHIN) - stopped


def _silence(place: Place) -> float:
    """Seconds since the one lease there was renewed."""
    ready = Namespace(place.namespace).partition("default").ready
    with RawClient(place.url) as client:
        pending = client.call("XPENDING", ready, GROUP, "-", "+", 1)
    return int(pending[0][2]) / 1000


async def _all_scenes(place: Place, times: int) -> list[tuple[str, list[float]]]:
    return [
        ("a supervised worker is killed", await supervised_kills(place.within("killed"), times)),
        ("a host is lost", await _some_at_once(place.within("lost"), host_lost, times)),
        ("a deploy: SIGTERM, another host goes on", await _some_at_once(place.within("deploy"), deploy, times, 1)),
    ]


async def _some_at_once(
    place: Place, scene: Callable[[Place], Awaitable[float]], times: int, at_once: int = _AT_ONCE
) -> list[float]:
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> float:
        async with room:
            return await scene(place.within(str(number)))

    return await asyncio.gather(*map(one, range(times)))


def main(times: Annotated[int, typer.Option(min=1, help="How often each is done.")] = 20) -> None:
    """Print how long it takes until a task goes on, lease of its default: median and worst."""
    with own_server(fsync=False) as place:
        print(machine_line(), server_line(place), sep="\n")
        found = run(_all_scenes(place, times))
    print(f"\nseconds until the task goes on, {times} times   {'median':>8} {'worst':>8}")
    for what, seconds in found:
        print(f"{what:47} {statistics.median(seconds):8.3f} {max(seconds):8.3f}")


if __name__ == "__main__":
    typer.run(main)
