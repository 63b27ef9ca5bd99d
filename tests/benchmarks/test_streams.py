"""The benchmark of streams runs. Nothing here asks how large a figure is."""

from __future__ import annotations

import pytest

from benchmarks.streams import emitted, written
from benchmarks.support.deployment import Deployment

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.mark.parametrize("raw", [False, True])
async def test_each_item_is_read_by_each_reader(redis_url: str, namespace_name: str, raw: bool) -> None:
    deployment = Deployment(redis_url, namespace_name)
    try:
        outcome = await emitted(deployment, 3, 20, 100, raw=raw)
        assert len(outcome.latencies) == 60
        outcome = await written(deployment.within("many"), 4, 10, 1, raw=raw)
        assert len(outcome.latencies) == 40
        assert min(outcome.latencies) > 0
    finally:
        deployment.purge()
