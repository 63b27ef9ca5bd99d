"""Profiles of a worker: which samples count for which function, and a run of the profiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.profile import innermost, profile
from benchmarks.support.profiled_process import profiler
from tests.support.paths import ROOT

SAMPLES = """\
<module> (app.py);run (asyncio/runners.py) 6
<module> (app.py);run (asyncio/runners.py);finish (perdure/queues/delivery/settlement.py) 2
<module> (app.py);run (asyncio/runners.py);call (perdure/a.py);finish (perdure/queues/delivery/settlement.py) 1
Thread._bootstrap (threading.py);Condition.wait (threading.py) 1000
<module> (app.py);<lambda> (a folder (old)/b.py) 1
"""


def test_the_folder_of_the_code_is_no_part_of_a_name() -> None:
    assert innermost(f"<module> ({ROOT.name}/benchmarks/a.py) 1") == {"benchmarks.a.<module>": 1.0}


def test_a_sample_counts_for_its_innermost_function() -> None:
    assert innermost(SAMPLES) == {
        "asyncio.runners.run": 0.6,
        "perdure.queues.delivery.settlement.finish": 0.3,
        "a folder (old).b.<lambda>": 0.1,
    }
    assert list(innermost(SAMPLES).values()) == [0.6, 0.3, 0.1]


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.skipif(profiler() is None, reason="py-spy is not installed; it has wheels for Linux only")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may always sample a process that is not its child")
@pytest.mark.parametrize("scenario", ["tasks", "steps"])
def test_a_worker_is_profiled(scenario: str, tmp_path: Path) -> None:
    (tmp_path / "perdure").symlink_to(ROOT)

    found = profile(tmp_path, scenario, 2_000)

    assert found.micros > 0
    assert sum(found.shares.values()) == pytest.approx(1)
    assert any(name.startswith("perdure.worker.") for name in found.shares)
