"""Each check of limits can fail: a small run is sound, and the check reports what is broken in the worker.

`sensitivity/test_defects.py` does the same with the scripts.
"""

from __future__ import annotations

import pytest

from ..plan import Fault, Plan, TaskPlan
from ..sensitivity.defects import replacement
from ..world import World
from .limits import LIMITED

_KEPT: list[World] = []


def kinds(plan: Plan, *changes: tuple[str, str]) -> set[str]:
    """Play a plan, with changed scripts; return the kinds of violations."""
    world = World(plan)
    world.server.alter = replacement(*changes)
    _KEPT.append(world)
    return {violation.kind for violation in world.play().violations}


def plan_of(kind: str, *faults: Fault, count: int = 5, steps: int = 2, pause: float = 0.3) -> Plan:
    tasks = tuple(TaskPlan(f"t{number}", kind, 0.5 + 0.02 * number, steps, pause) for number in range(count))
    return Plan(1, 2, 1.0, tasks, faults, clean=5.0)


@pytest.mark.parametrize("kind", sorted({*LIMITED}))
def test_no_guarantee_is_violated(kind: str) -> None:
    assert kinds(plan_of(kind)) == set()
    world = _KEPT[-1]
    assert any(entry.what == "holds" for entry in world.journal.entries)


@pytest.mark.parametrize("kind", sorted({*LIMITED}))
def test_no_guarantee_is_violated_after_a_kill(kind: str) -> None:
    assert kinds(plan_of(kind, Fault(0.9, "kill", 0, 0.5), Fault(1.3, "kill", 1, 0.5))) == set()
