"""The producer's router without Redis: calls that overlap while it reads the next route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure.queues.keys import Namespace, Partition
from perdure.queues.partitions import router
from perdure.queues.partitions.route import SINGLE, Route
from perdure.queues.partitions.router import PartitionRouter


async def test_a_call_that_comes_while_another_reads_the_next_route_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last partition that both know has refused a task, and the route that replaces it is on its way."""
    former, reading, read = SINGLE.changed(2), asyncio.Event(), asyncio.Event()
    closed = {former.last.index_of(7)}

    async def sync_route(*_: Any) -> Route:
        return former

    async def next_route(*_: Any) -> Route:
        reading.set()
        await read.wait()
        return former.changed(3)

    async def store(partition: Partition) -> bool:
        await asyncio.sleep(0)
        return partition.index not in {0, *closed}

    monkeypatch.setattr(router, "sync_route", sync_route)
    monkeypatch.setattr(router, "next_route", next_route)
    known: Any = None
    routed = PartitionRouter(known, Namespace("test"), "default")
    first = asyncio.create_task(routed.place(7, store))
    await reading.wait()
    second = asyncio.create_task(routed.place(7, store))
    await asyncio.sleep(0)
    read.set()
    found = await asyncio.wait_for(asyncio.gather(first, second), 5)
    assert set(found) == {await routed.place(7, store)}
