"""The simulation of many agents, and the program that compares it with a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.scale.simulation import ACTS, BEFORE, Costs, Fleet, nodes_for, simulate
from benchmarks.support.origin import Origin
from tests.support.paths import ROOT

COSTS = Costs(waking=400.0, step=50.0, idle=0.02, latency=3.0, parked=5_000.0)


def test_the_load_is_the_costs_of_all_wakings_and_idle_workers() -> None:
    fleet = Fleet(agents=60_000, every=60, steps=4, think=0.1)
    found = simulate(fleet, COSTS, seconds=30)
    assert found.loads[0] == pytest.approx(1_000 * (400 + 4 * 50) / 1e6 + 0.02, rel=0.05)
    assert found.memory == 60_000 * 5_000
    assert found.running == pytest.approx(fleet.running, rel=0.25)


def test_the_latency_is_the_measured_one_while_nodes_are_idle() -> None:
    found = simulate(Fleet(agents=100, every=10, steps=1, think=0), COSTS, seconds=200)
    assert found.median == pytest.approx(3.0, rel=0.01)


def test_commands_wait_for_each_other_on_a_busy_node() -> None:
    """The longest waits exceed the mean of an M/D/1 queue: u / (2 (1 - u)) times the service time."""
    load, act = 0.8, 100e-6
    costs = Costs(waking=ACTS * act * 1e6, step=0, idle=0, latency=BEFORE * act * 1e3, parked=0)
    fleet = Fleet(agents=round(load / (ACTS * act)), every=1, steps=0, think=0)
    busy = simulate(fleet, costs, seconds=60)
    assert busy.loads[0] == pytest.approx(load, rel=0.03)
    waited = load / (2 * (1 - load)) * act * 1e3
    assert BEFORE * act * 1e3 < busy.median
    assert busy.worst > BEFORE * act * 1e3 + waited


def test_more_nodes_share_the_load() -> None:
    fleet = Fleet(agents=60_000, every=60, steps=4, think=0.1)
    found = simulate(fleet, COSTS, seconds=30, shares=[0.5, 0.25, 0.25])
    assert found.loads[0] == pytest.approx(0.3 + 0.02 / 3, rel=0.05)
    assert found.loads[2] == pytest.approx(0.15 + 0.02 / 3, rel=0.08)


def test_the_number_of_nodes_is_that_of_the_scarcer_of_processor_and_memory() -> None:
    fleet = Fleet(agents=1_000_000, every=600, steps=10, think=3)
    assert nodes_for(fleet, COSTS, used=0.7, memory=16e9) == 3  # 1.5 cores
    assert nodes_for(fleet, COSTS, used=0.7, memory=1e9) == 5


@pytest.mark.integration
@pytest.mark.processes
def test_the_program_shows_what_was_simulated_and_what_was_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.agents", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Origin.parse(done.stdout.splitlines()[0])
    assert "| CPU of each node" in done.stdout
    assert "| every 10 minutes" in done.stdout
