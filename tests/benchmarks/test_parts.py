"""The benchmark of the parts of a task runs to its end. Nothing here asks how large a figure is."""

from __future__ import annotations

import pytest

from benchmarks.parts import parts, totals, walked
from benchmarks.support.deployment import Deployment


async def test_each_part_of_a_task_and_of_a_step_is_measured() -> None:
    walked.clear()
    found = dict(await parts(50))
    assert "a durable step, from call to record" in found
    assert set(walked) == {50}


@pytest.mark.integration
async def test_the_totals_are_measured_in_a_worker(redis_url: str, namespace_name: str) -> None:
    walked.clear()
    found = await totals(Deployment(redis_url, namespace_name), 320)
    assert [name for name, _ in found] == [
        "total: a no-op task in a worker, concurrency 32",
        "total: a step, 32 concurrent tasks",
    ]
    assert sum(walked) >= 320
