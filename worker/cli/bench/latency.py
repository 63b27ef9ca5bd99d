"""How long things take one after the other: the way to the server, and from a call to the handler it starts."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import Final

import anyio.to_thread

from ...runtime import Worker
from ..failures import Failed
from . import limits
from .figures import Row, Size, message, percentile
from .ground import Ground
from .tasks import hear_starts, pick_up

__all__ = ["latency", "raw_round_trip", "round_trip"]

_PINGS: Final = 200
_PICK_UPS: Final = 200
_FEWEST: Final = 20

_IN_TURN: Final = 2.0
"""Seconds that pick-ups may take: on a far server fewer of them are measured."""

_TRIPS: Final = 6
"""Round trips of one pick-up: enqueued, read, settled, its result waited for and read, and one for good measure."""

_HEARD_WITHIN: Final = 60.0


async def round_trip(ground: Ground, size: Size) -> list[Row]:
    """The way to the server and back."""
    found = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        await ground.gateway.command("PING")
        found.append((time.perf_counter() - began) * 1000)
    return [Row("ping", "round trip, p50", "ms", statistics.median(found), raw_round_trip(ground), "PING")]


async def latency(ground: Ground, size: Size) -> list[Row]:
    """From the call that enqueues to the first line of the handler, in a worker that has nothing to do."""
    count = max(_FEWEST, min(_PICK_UPS, int(_IN_TURN * 1000 / (_TRIPS * raw_round_trip(ground)))))
    raw = await anyio.to_thread.run_sync(_raw_pick_ups, ground, count)
    begun: asyncio.Queue[float] = asyncio.Queue()
    hear_starts(begun.put_nowait)
    found = []
    async with Worker(ground.app, concurrency=size.concurrency) as worker:
        running = asyncio.create_task(worker.run())
        try:
            for _ in range(count):
                sent = time.perf_counter()
                handle = await pick_up.enqueue()
                found.append((await asyncio.wait_for(begun.get(), _HEARD_WITHIN) - sent) * 1000)
                await handle.result(timeout=_HEARD_WITHIN)
        finally:
            worker.stop()
            await running
    does = "XADD to a blocked XREADGROUP"
    return [
        Row("pick_up_p50", "enqueue to handler start, p50", "ms", percentile(found, 50), percentile(raw, 50), does),
        Row("pick_up_p99", "enqueue to handler start, p99", "ms", percentile(found, 99), percentile(raw, 99), does),
    ]


def raw_round_trip(ground: Ground) -> float:
    """Milliseconds, p50, of the raw client."""
    found = []
    with ground.raw_client() as client:
        for _ in range(_PINGS):
            began = time.perf_counter()
            client.call("PING")
            found.append((time.perf_counter() - began) * 1000)
    return statistics.median(found)


def _raw_pick_ups(ground: Ground, count: int) -> list[float]:
    """Milliseconds from sending to when a reader that waits has it."""
    stream, heard, found = ground.raw.nudge, threading.Semaphore(0), []
    sent = [0.0]
    with ground.raw_client() as sender, ground.raw_client() as reader:
        limits.make_groups(sender, stream)
        read = ("XREADGROUP", "GROUP", limits.GROUP, limits.READER, "BLOCK", 5000, "STREAMS", stream, ">")

        def listen() -> None:
            for _ in range(count):
                reader.call(*read)
                found.append((time.perf_counter() - sent[0]) * 1000)
                heard.release()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        for _ in range(count):
            time.sleep(0.002)  # the reader waits again
            sent[0] = time.perf_counter()
            sender.call("XADD", stream, "*", *message(""))
            if not heard.acquire(timeout=_HEARD_WITHIN):
                raise Failed("the raw client's reader heard nothing")
        listening.join()
    return found
