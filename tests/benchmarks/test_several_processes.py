"""The benchmark of several processes runs. Nothing here asks how large a figure is."""

from __future__ import annotations

import pytest

from benchmarks.several_processes import share
from benchmarks.support.deployment import Deployment

pytestmark = [pytest.mark.integration, pytest.mark.processes]


async def test_the_load_of_the_server_follows_from_the_rate_and_its_cpu_per_task(
    redis_url: str, namespace_name: str
) -> None:
    deployment = Deployment(redis_url, namespace_name)
    try:
        found = await share(deployment, 2, 20_000)
    finally:
        deployment.purge()
    assert found.processes == 2
    assert found.carried > 0
    assert found.server == pytest.approx(found.load / found.rate * 1e6, rel=0.2)
