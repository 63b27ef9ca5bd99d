"""The simulation itself: a seed is one run, byte for byte, and what goes wrong is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from .plan import Fault, Plan, TaskPlan, draw
from .shrink import shrink
from .story import narrate
from .world import Outcome, World

_KEPT: list[World] = []


def play(plan: Plan, alter: Callable[[bytes], bytes] | None = None) -> Outcome:
    world = World(plan)
    if alter is not None:
        world.server.alter = alter
    _KEPT.append(world)
    return world.play()


@pytest.mark.parametrize("seed", range(4))
def test_no_guarantee_is_violated(seed: int) -> None:
    assert play(draw(seed)).violations == []


def digests(*seeds: int) -> str:
    """Return the digest of the last of some runs in a process of their own."""
    script = f"""
from tests.simulation.plan import draw
from tests.simulation.world import World
worlds = [World(draw(seed)) for seed in {seeds}]
print([world.play().digest for world in worlds][-1])
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return run.stdout.strip()


def test_a_seed_is_one_run_in_every_process() -> None:
    assert digests(6) == digests(0, 6)


def small(*faults: Fault, kind: str = "chain") -> Plan:
    return Plan(1, 2, 1.0, (TaskPlan("t0", kind, 0.5, 4, 0.3),), faults)


def test_a_killed_worker_leaves_its_task_to_another() -> None:
    outcome = play(small(Fault(1.0, "kill", 0, 3.0), Fault(1.1, "kill", 1, 3.0)))
    assert outcome.violations == []
    runs = [entry.run for entry in _KEPT[-1].journal.entries if entry.what == "run"]
    assert len(runs) == 2
    assert [entry.value for entry in _KEPT[-1].journal.entries if entry.what == "result"] != []


def without_line(line: bytes) -> Callable[[bytes], bytes]:
    """Return a change of scripts that leaves out a line."""
    return lambda source: b"\n".join(one for one in source.split(b"\n") if one.strip() != line)


def test_a_task_in_two_places_is_seen_at_once() -> None:
    kinds = {
        violation.kind for violation in play(small(), without_line(b"redis.call('XDEL', KEYS[1], ARGV[3])")).violations
    }
    assert "one place" in kinds


def test_a_record_that_is_not_stored_is_seen() -> None:
    """A checkpoint script that stores no field: the step runs again after a crash."""
    plan = small(Fault(1.2, "kill", 0, 3.0), Fault(1.3, "kill", 0, 3.0))
    stores_nothing = lambda source: source.replace(b"redis.call('HSET', KEYS[3], 'd:' .. step, value)", b"")  # noqa: E731
    assert {violation.kind for violation in play(plan, stores_nothing).violations} >= {"repeated"}


def test_a_run_shrinks_to_what_its_violation_needs() -> None:
    plan = small(Fault(1.0, "kill", 0, 3.0))
    plan = replace(plan, tasks=(*plan.tasks, TaskPlan("t1", "hasty", 0.6, 2, 0.0)))
    alter = without_line(b"redis.call('XDEL', KEYS[1], ARGV[3])")
    smallest = shrink(plan, StringIO(), alter)
    assert len(plan.faults) > len(smallest.faults) == 0
    assert len(smallest.tasks) == 1


def test_the_story_names_what_happened() -> None:
    plan = small(Fault(1.0, "kill", 0, 3.0))
    outcome = play(plan)
    story = "\n".join(narrate(_KEPT[-1], outcome))
    assert "fault:   1.00 s  kill" in story
    assert "t0 is stored" in story
    assert f"digest {outcome.digest}" in story


def test_shrinking_leaves_a_sound_run_alone() -> None:
    plan = small()
    assert shrink(plan, StringIO()) is plan
