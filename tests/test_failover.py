"""Under load: slots moved, a primary killed, with Redis Cluster and with Sentinel. Nothing acknowledged is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import default_kind
from failover import primary_killed, resharding, sentinel_primary_killed
from load import Figures
from servers import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def program() -> Path:
    found = find_program(default_kind())
    if found is None:
        pytest.skip(f"no {default_kind()} server here")
    return found


def check(figures: Figures) -> None:
    print(*(f"{name}: {value}" for name, value in figures.rows()), sep="\n")  # noqa: T201 - shown when it fails
    assert figures.lost == 0
    assert figures.acknowledged >= 200
    assert figures.waiters == figures.waited
    assert figures.unexplained == 0


async def test_slots_are_moved_under_load(program: Path, tmp_path: Path) -> None:
    figures = await resharding(program, tmp_path, rounds=2)
    check(figures)
    assert figures.run_twice == 0
    assert figures.vanished == 0
    assert min(figures.redirections.values()) > 0, "MOVED, ASK and TRYAGAIN were all met"


async def test_a_primary_of_a_cluster_is_killed_under_load(program: Path, tmp_path: Path) -> None:
    check(await primary_killed(program, tmp_path, rounds=1))


async def test_the_primary_of_sentinels_is_killed_under_load(program: Path, tmp_path: Path) -> None:
    check(await sentinel_primary_killed(program, tmp_path, rounds=1))
