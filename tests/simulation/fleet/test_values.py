"""Each check of values can fail: a small run is sound, and the check reports what is broken in the worker."""

from __future__ import annotations

from typing import Any

import pytest
from perdure.worker.durable import values as values_of_runs
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.durable.steps.keys import StepKeys
from perdure.worker.durable.steps.matching import match_call

from ..plan import Fault, Plan, TaskPlan
from ..sensitivity.defects import replacement
from ..world import World

_KEPT: list[World] = []


def kinds(plan: Plan, *changes: tuple[str, str]) -> set[str]:
    """Play a plan, with changed scripts; return the kinds of violations."""
    world = World(plan)
    world.server.alter = replacement(*changes)
    _KEPT.append(world)
    return {violation.kind for violation in world.play().violations}


KILLED = Plan(
    1,
    2,
    1.0,
    tuple(TaskPlan(f"t{number}", "steers", 0.5 + 0.01 * number, 3, 1.6) for number in range(4)),
    (Fault(4.2, "kill", 0, 1.0), Fault(4.25, "kill", 0, 1.0)),
    clean=8.0,
)
"""Both workers die in the second step, after changes that are stored."""


def test_a_set_that_a_resumed_run_makes_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(KILLED) == set()
    count = StepKeys.count

    def of_this_run(keys: StepKeys, name: str) -> tuple[str, int]:
        key, number = count(keys, name)
        return f"{key}{id(keys)}", number

    monkeypatch.setattr(StepKeys, "count", of_this_run)
    assert "stored again" in kinds(KILLED)


def test_a_read_that_is_not_recorded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:

    async def unknown(*args: Any) -> Any:
        return (await match_call(*args))[0], None, None

    monkeypatch.setattr(values_of_runs, "match_call", unknown)
    assert "other value" in kinds(KILLED)


def test_a_value_that_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointWriter, "report", lambda writer, *entries: None)
    assert "set lost" in kinds(KILLED)


def test_an_update_that_is_acknowledged_and_not_stored_is_seen() -> None:
    defect = ("redis.call('HSET', inbox, 'v:' .. name, ", "tostring(")
    assert "update lost" in kinds(KILLED, defect)
