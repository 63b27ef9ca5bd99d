"""Time from SIGTERM to one worker until another, idle worker process resumes its task."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Mapping

from perdure import Producer

from . import limits
from .figures import Figure, Line, Measure
from .place import Place
from .processes import started
from .raw import RawClient
from .replica import TICK
from .size import Size

__all__ = ["HAND_OVER"]

_STARTED_WITHIN = 10.0
_RAW_TIMES = 20


async def _round(place: Place, size: Size) -> Mapping[str, Figure]:
    return {"hand_over": Figure(await _perdure(place), await _raw(place))}


async def _perdure(place: Place) -> float:
    """Return milliseconds. They include up to one step, which the stopping worker finishes first."""
    async with (
        Producer(place.url, namespace=place.namespace) as producer,
        started("replica", place) as stopping,
    ):
        await producer.enqueue("tick")
        await stopping.reported(_STARTED_WITHIN)
        async with started("replica", place) as next_one:
            await asyncio.sleep(random.uniform(0.2, 0.4))
            stopped = stopping.send(signal.SIGTERM)
            return (await next_one.reported(_STARTED_WITHIN) - stopped) * 1000


async def _raw(place: Place) -> float:
    """Return milliseconds, the median of several repetitions with the same reader."""
    limits.make_group(place)
    with RawClient(place.url) as client:
        limits.add_message(client, place)
        entry = limits.take_message(client, place)
        async with started("raw_reader", place) as reader:
            found = []
            for _ in range(_RAW_TIMES):
                await asyncio.sleep(0.01)
                began = time.monotonic()
                limits.release(client, place, entry)
                found.append((await reader.reported(_STARTED_WITHIN) - began) * 1000)
            return statistics.median(found)


HAND_OVER = Measure(
    "hand_over",
    [
        Line(
            "hand_over",
            f"SIGTERM until another worker resumes, {TICK * 1000:g} ms steps",
            "ms",
            "XCLAIM + XADD, XREADGROUP + XAUTOCLAIM",
        )
    ],
    _round,
)
