"""The benchmark of limits runs. Nothing here asks how large a figure is, except who has a turn."""

from __future__ import annotations

import pytest

from benchmarks.limits import costs, releases, turns
from benchmarks.support.deployment import Deployment

pytestmark = [pytest.mark.integration, pytest.mark.processes]


async def test_small_tenants_start_before_a_large_one_has_ended(redis_url: str, namespace_name: str) -> None:
    deployment = Deployment(redis_url, namespace_name)
    try:
        fair = await turns(deployment, 400)
        assert fair.large < 300
        found = await costs(deployment.within("costs"), 50, 1)
        assert {kind: len(rates) for kind, rates in found.items()} == {"plain": 1, "declared": 1, "limited": 1}
        assert len(await releases(deployment.within("release"), 10)) == 10 - 1
    finally:
        deployment.purge()
