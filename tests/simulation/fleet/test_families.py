"""Each check of waits and families can fail: a small run is sound, and the check reports what is broken in the worker.

`sensitivity/test_defects.py` does the same with the scripts.
"""

from __future__ import annotations

from typing import Any

import pytest
from perdure.queues import waits
from perdure.worker.durable import answers, joining, sleeping
from perdure.worker.durable.waiting import TIMED_OUT

from ..plan import Fault, Plan, TaskPlan
from ..world import World

_KEPT: list[World] = []


def kinds(plan: Plan) -> set[str]:
    """Play a plan; return the kinds of violations."""
    world = World(plan)
    _KEPT.append(world)
    return {violation.kind for violation in world.play().violations}


def plan_of(kind: str, *faults: Fault, count: int = 1) -> Plan:
    tasks = tuple(TaskPlan(f"t{number}", kind, 0.5 + 0.01 * number, 3, 0.3) for number in range(count))
    return Plan(1, 2, 1.0, tasks, faults, clean=5.0)


def test_a_sleep_that_is_too_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(plan_of("naps")) == set()

    async def no_wait(*_: Any, **__: Any) -> object:
        return TIMED_OUT

    monkeypatch.setattr(sleeping, "wait_until", no_wait)
    assert kinds(plan_of("naps")) == {"early"}


def test_an_answer_to_another_question_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(plan_of("asks", count=3)) == set()
    monkeypatch.setattr(answers, "wait_id", lambda key: waits.wait_name(waits.wait_id(key)))
    assert "other question" in kinds(plan_of("asks", count=3))


def test_a_plan_of_children_that_is_not_found_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = plan_of("gathers", Fault(0.4, "kill", 0, 3.0, "notify_join"), Fault(0.6, "kill", 1, 3.0))
    assert kinds(killed) == set()
    plan_of_call, calls = joining._plan_of, iter(range(1000))
    monkeypatch.setattr(joining, "_plan_of", lambda *of: plan_of_call(*of) if next(calls) > 5 else None)
    assert "child doubled" in kinds(killed)
