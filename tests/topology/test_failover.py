"""Failover under load with Redis Cluster: no acknowledged task is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topology.failover import check_figures, primary_killed, resharding

pytestmark = [pytest.mark.cluster, pytest.mark.integration, pytest.mark.processes]


async def test_no_acknowledged_task_is_lost_when_slots_migrate(server_program: Path, tmp_path: Path) -> None:
    figures = await resharding(server_program, tmp_path, rounds=2)
    check_figures(figures)
    assert figures.run_twice == 0
    assert figures.vanished == 0
    assert min(figures.redirections.values()) > 0, "MOVED, ASK and TRYAGAIN were all met"


async def test_no_acknowledged_task_is_lost_when_a_cluster_primary_is_killed(
    server_program: Path, tmp_path: Path
) -> None:
    check_figures(await primary_killed(server_program, tmp_path, rounds=1))
