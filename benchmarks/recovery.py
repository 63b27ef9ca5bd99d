"""From the death of a worker process to its step running again in another, which was idle already."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping
from dataclasses import replace

from perdure import Producer
from perdure.queues import Namespace
from perdure.queues.keys import GROUP

from .figures import Figure, Line, Measure
from .place import Place
from .processes import started
from .raw import RawClient
from .size import Size

__all__ = ["recovery"]

_STARTED_WITHIN = 10.0


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


def _silence(place: Place) -> float:
    """Seconds since the one lease there was renewed."""
    ready = Namespace(place.namespace).partition("default").ready
    with RawClient(place.url) as client:
        pending = client.call("XPENDING", ready, GROUP, "-", "+", 1)
    return int(pending[0][2]) / 1000
