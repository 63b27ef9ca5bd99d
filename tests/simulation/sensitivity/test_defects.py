"""Defects of the scripts: each is seen in a small run, which is sound without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from ..plan import Fault, Plan, TaskPlan
from ..world import Outcome, World
from .defects import DEFECTS, replacement

_KEPT: list[World] = []

_VARIANTS = 8
"""Interleavings of a run that are tried, since not each of them needs what the defect has taken away."""


def play(plan: Plan, defect: str | None = None) -> Outcome:
    world = World(plan)
    if defect is not None:
        world.server.alter = replacement(*DEFECTS[defect])
    _KEPT.append(world)
    return world.play()


def chains(count: int, steps: int = 2, at: float = 0.5) -> tuple[TaskPlan, ...]:
    return tuple(TaskPlan(f"t{at}-{number}", "chain", at + 0.01 * number, steps, 0.5) for number in range(count))


def tasks_of(kind: str, count: int = 1, steps: int = 3) -> tuple[TaskPlan, ...]:
    return tuple(TaskPlan(f"t{number}", kind, 0.5 + 0.01 * number, steps, 0.3) for number in range(count))


STILL: Final = Plan(
    1, 2, 1.0, (*chains(3, 6), *chains(4, 4, 1.6)), (Fault(1.05, "freeze", 0, 2.0, "renew_leases"),), slots=3
)
"""A worker stands still after a renewal while the other is busy; then it looks for lost tasks before it renews."""

RUNS = {
    # The server loses records that it has confirmed; the run then records its next step.
    "entries after a gap are stored": (
        Plan(1, 1, 1.0, chains(1, 4), (Fault(1.8, "lose tail", 0, 0.7, "write_checkpoint"),)),
        "gap",
    ),
    # The reply to a record is lost, so it is written again.
    "an entry that is stored is applied again": (
        Plan(1, 1, 1.0, chains(1), (Fault(0.6, "cut", 0, 0.0, "write_checkpoint"),)),
        "log",
    ),
    # The server loses that it handed a message to a worker, and hands it to the same one again; a record of the first
    # run is on its way.
    "a fence without the delivery count": (
        Plan(
            1,
            1,
            1.0,
            (TaskPlan("t0", "chain", 0.5, 1, 0.3), TaskPlan("t1", "chain", 0.55, 2, 0.31)),
            (Fault(0.6, "lose tail", 0, 0.0002, "XREADGROUP"), Fault(0.9, "late", 0, 0.15, "write_checkpoint")),
            slots=1,
        ),
        "stale write",
    ),
    # A worker releases a task twice, since the reply was late; the second release arrives when no worker has the task.
    "a fence without the worker": (
        Plan(1, 1, 1.0, chains(1), (Fault(0.6, "late", 0, 0.3, "release"), Fault(0.7, "stop", 0, 1.0))),
        "stale write",
    ),
    "a release lowers the delivery count": (Plan(1, 1, 1.0, chains(1), (Fault(0.7, "stop", 0, 1.0),)), "fence"),
    "a settled delivery is forgotten": (
        Plan(1, 1, 1.0, chains(1), (Fault(0.6, "cut", 0, 0.0, "finish"),)),
        "refused",
    ),
    # The clock is set, and the worker without tasks looks for lost ones before the other renews its leases.
    "leases are not restarted": (Plan(1, 2, 1.0, chains(5, 4), (Fault(2.0, "step clock", 0, 60.0),)), "lease lost"),
    "claims while leases are left to restart": (
        Plan(1, 2, 1.0, chains(5, 4), (Fault(2.0, "step clock", 0, 60.0),), restarts=1),
        "lease lost",
    ),
    "a worker claims what it runs": (STILL, "own claim"),
    "a worker claims what it runs by XAUTOCLAIM": (STILL, "own claim"),
    # Impatient senders answer twice while the run works.
    "an answer replaces the one that a wait has": (Plan(1, 1, 1.0, tasks_of("orders", 4), ()), "answer lost"),
    "an early answer is not given to its wait": (Plan(1, 1, 1.0, tasks_of("early"), ()), "answer lost"),
    # The reply to the launch of a child is lost, so it is launched again.
    "a child that is known is enqueued again": (
        Plan(1, 1, 1.0, tasks_of("family"), (Fault(0.4, "cut", 0, 0.0, "enqueue_child"),), clean=5.0),
        "one place",
    ),
    # The reply to a notice is lost, so it is delivered again.
    "the end of a child is counted twice": (
        Plan(1, 1, 1.0, tasks_of("streams"), (Fault(0.4, "cut", 0, 0.0, "notify_join"),), clean=5.0),
        "other child",
    ),
    "the end of a child lets no other one start": (Plan(1, 1, 1.0, tasks_of("gathers"), (), clean=5.0), "no progress"),
    "the end of a child does not wake its parent": (Plan(1, 1, 1.0, tasks_of("gathers"), (), clean=5.0), "no progress"),
    "a delivered notice leaves the record for ever": (Plan(1, 1, 1.0, tasks_of("gathers"), (), clean=5.0), "leak"),
    "a closed join is left": (Plan(1, 1, 1.0, tasks_of("gathers"), (), clean=5.0), "leak"),
    "a keyed item is stored again": (Plan(1, 1, 1.0, tasks_of("narrates"), ()), "keyed twice"),
    "a mark is not stored": (Plan(1, 1, 1.0, tasks_of("narrates"), (Fault(0.75, "kill", 0, 0.3),)), "doubled item"),
    "the note of what was emitted is not stored": (
        Plan(1, 1, 1.0, tasks_of("narrates"), (Fault(0.75, "kill", 0, 0.3),)),
        "doubled item",
    ),
    "the numbers of items have gaps": (Plan(1, 1, 1.0, tasks_of("narrates"), ()), "stream ids"),
    "the names of streams are not kept": (Plan(1, 1, 1.0, tasks_of("narrates"), ()), "leak"),
    "streams outlive their task": (Plan(1, 1, 1.0, tasks_of("narrates"), ()), "leak"),
    "a fresh replay voids no item": (
        Plan(1, 1, 1.0, tasks_of("laments"), (Fault(6.0, "replay", 0, 0.0),)),
        "doubled item",
    ),
    "a limit lets one more start": (Plan(1, 2, 1.0, tasks_of("pooled", 5), ()), "above the limit"),
    "the number of a key is not counted": (Plan(1, 2, 1.0, tasks_of("rents", 5), ()), "above the limit"),
    "a start is not charged": (Plan(1, 2, 1.0, tasks_of("paced", 8), ()), "not charged"),
    "a rate lets too many start": (Plan(1, 2, 1.0, tasks_of("paced", 8), ()), "above the rate"),
    # The clock is set while tasks run, and the next one is enqueued.
    "tokens expire when the clock is set": (
        Plan(1, 2, 1.0, tasks_of("pooled", 12), (Fault(0.56, "step clock", 0, 60.0),)),
        "overlap",
    ),
    "a token is not released": (Plan(1, 2, 1.0, tasks_of("pooled", 3), ()), "not released"),
    "a release leaves the token of the key": (Plan(1, 2, 1.0, tasks_of("rents", 3), ()), "not released"),
    "a task that wakes goes to the end of its ordered list": (Plan(1, 2, 1.0, tasks_of("halts", 5), ()), "overtaken"),
    "an admitted task leaves its ordered list": (Plan(1, 2, 1.0, tasks_of("halts", 5), ()), "overtaken"),
    # Two blocks last longer than a lease.
    "tokens are not renewed": (
        Plan(1, 2, 1.0, tuple(replace(task, pause=0.7) for task in tasks_of("borrows", 3)), ()),
        "overlap",
    ),
}


@pytest.mark.parametrize("defect", RUNS)
def test_a_defect_is_seen(defect: str) -> None:
    plan, kind = RUNS[defect]
    for variant in range(_VARIANTS):
        tried = replace(plan, variant=variant)
        assert play(tried).violations == []
        if kind in {violation.kind for violation in play(tried, defect).violations}:
            return
    pytest.fail(f"no violation of the kind {kind!r} in {_VARIANTS} interleavings")


def test_every_defect_has_a_run() -> None:
    assert RUNS.keys() == DEFECTS.keys()
