"""Reduction of a failing run to what its violation needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from .plan import Plan
from .world import World

__all__ = ["shrink"]


class _Writer(Protocol):
    def write(self, text: str, /) -> object: ...


_WORLDS: list[World] = []


def shrink(plan: Plan, progress: _Writer, alter: Callable[[bytes], bytes] | None = None) -> Plan:
    """Return the smallest plan found that still violates the same guarantee; the plan itself if it violates none.

    Faults and tasks are left out one by one, as long as the violation stays. A smaller run draws other interleavings,
    so a few are tried for each. alter: see `SimulatedServer.alter`.
    """
    wanted = _kinds(plan, alter)
    if not wanted:
        return plan
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(plan):
            if wanted & _kinds(candidate, alter):
                plan, smaller = candidate, True
                progress.write(f"{len(plan.faults)} faults, {len(plan.tasks)} tasks, {plan.workers} workers\n")
                break
    return plan


def _kinds(plan: Plan, alter: Callable[[bytes], bytes] | None) -> set[str]:
    world = World(plan)
    if alter is not None:
        world.server.alter = alter
    _WORLDS.append(world)  # see __main__
    return {violation.kind for violation in world.play().violations}


def _smaller(plan: Plan) -> Iterator[Plan]:
    for variant in range(plan.variant, plan.variant + 4):
        tried = replace(plan, variant=variant)
        for fault in plan.faults:
            yield tried.without(fault)
        for task in plan.tasks:
            if len(plan.tasks) > 1:
                yield replace(tried, tasks=tuple(one for one in plan.tasks if one is not task))
        if plan.workers > 1:
            yield replace(tried, workers=plan.workers - 1)
        if plan.settings:
            yield replace(tried, settings=(), stored_lease=0.0)
        for session in plan.sessions:
            yield replace(tried, sessions=tuple(one for one in plan.sessions if one is not session))
        if plan.supervisors is not None and not any(task.kind == "poison" for task in plan.tasks):
            yield replace(tried, supervisors=None)
        if plan.again:
            yield replace(tried, again=0.0)
