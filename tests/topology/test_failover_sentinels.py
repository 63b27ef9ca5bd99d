"""Failover under load under Sentinel: no acknowledged task is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topology.failover import check_figures, sentinel_primary_killed, sentinel_primary_replaced

pytestmark = [pytest.mark.cluster, pytest.mark.integration, pytest.mark.processes]


async def test_no_acknowledged_task_is_lost_when_the_sentinel_primary_is_killed(
    server_program: Path, tmp_path: Path
) -> None:
    check_figures(await sentinel_primary_killed(server_program, tmp_path, rounds=1))


async def test_no_acknowledged_task_is_lost_when_sentinels_replace_the_primary(
    server_program: Path, tmp_path: Path
) -> None:
    check_figures(await sentinel_primary_replaced(server_program, tmp_path, rounds=1))
