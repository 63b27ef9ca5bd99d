"""Priorities in a cluster: the lanes of a queue are in other slots, and on other nodes, than its normal tasks."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import App, Context, Settings
from perdure.queues import set_partitions
from perdure.queues.partitions.resharding import load_route

from tests.support.servers.clusters import Cluster, slot_of
from tests.support.workers import BOUND, running_worker, work_off

pytestmark = [pytest.mark.cluster, pytest.mark.integration]

LANES: list[dict[str, Any]] = [{"idle": True}, {"priority": "low"}, {}, {"priority": "high"}]


@pytest.mark.parametrize("partitions", [1, 3])
async def test_priorities_hold_over_the_nodes_of_a_cluster(
    shared_cluster: Cluster, namespace_name: str, partitions: int
) -> None:
    starts: list[str] = []
    settings = Settings(redis_url=shared_cluster.url(), namespace=namespace_name)
    async with App("ranked", settings=settings) as app:

        @app.task
        async def job(ctx: Context, lane: str) -> None:
            starts.append(lane)

        await set_partitions(app.producer.gateway, app.producer.namespace, "ranked", partitions)
        slots = set[int]()
        for options in LANES:
            lane = "idle" if options.get("idle") else options.get("priority", "normal")
            handles = await job.options(**options).enqueue_many([{"lane": lane}] * 16)
            slots |= {slot_of(handle.partition.ready) for handle in handles}
        assert len(slots) >= len(LANES)
        await work_off(app, concurrency=4)
        assert len(starts) == 64
        assert starts[-16:] == ["idle"] * 16
        mixed = starts[: len(starts) - starts[::-1].index("high")]
        for first in range(len(mixed) - 7):
            assert set(mixed[first : first + 8]) != {"high"}
        assert len(mixed) <= 16 + 8


async def test_a_worker_serves_a_lane_that_is_added_and_resharded_under_it(
    shared_cluster: Cluster, namespace_name: str
) -> None:
    settings = Settings(redis_url=shared_cluster.url(), namespace=namespace_name)
    async with App("ranked", settings=settings) as app:

        @app.task
        async def job(ctx: Context, number: int) -> int:
            return number

        async with running_worker(app, concurrency=16):
            for count in (1, 2, 1):
                await set_partitions(app.producer.gateway, app.producer.namespace, "ranked", count)
                for options in LANES:
                    handle = await job.options(**options).enqueue(count)
                    assert await handle.result(timeout=BOUND) == count
        route = await load_route(app.producer.gateway, app.producer.namespace, "ranked")
        assert route is not None
        assert [generation.count for generation in route.latest] == [1, 1, 1, 1]
