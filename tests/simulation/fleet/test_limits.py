"""Each check of limits can fail: a small run is sound, and the check reports what is broken in the worker.

`sensitivity/test_defects.py` does the same with the scripts.
"""

from __future__ import annotations

from typing import Any

import pytest
from perdure.worker.durable import limit_tokens
from perdure.worker.durable.limit_tokens import AdmissionToken, LimitCalls

from ..plan import Fault, Plan, TaskPlan
from ..world import World
from .limits import LIMITED

_KEPT: list[World] = []


def kinds(plan: Plan) -> set[str]:
    """Play a plan; return the kinds of violations."""
    world = World(plan)
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


def test_a_task_that_starts_without_a_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks were stored without their limits, so their messages have no tokens."""

    async def confirm(token: AdmissionToken, *_: Any) -> None:
        token.confirmed = True

    monkeypatch.setattr(AdmissionToken, "confirm", confirm)
    assert "overlap" in kinds(plan_of("pooled"))


def test_a_token_that_no_run_releases_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitCalls, "release", lambda *_: None)
    assert "not released" in kinds(plan_of("pooled", count=2))


def test_a_token_that_a_parked_task_does_not_keep_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_tokens, "KEPT", "x")
    assert "token not kept" in kinds(plan_of("keeps"))
