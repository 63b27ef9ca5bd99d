"""Runs with supervisors: what they do in virtual time, and that each of their checks can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import anyio
import pytest
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.quarantine_store import CrashReport
from perdure.worker.cli.support.worker_process import SupervisedWorker
from perdure.worker.runtime import quarantine_gate
from perdure.worker.runtime.children.child import Child
from perdure.worker.runtime.children.processes import StallMonitor
from perdure.worker.runtime.stages import crash_limit
from perdure.worker.supervise.crash_counter import SupervisorRegistry
from perdure.worker.supervise.pool import WorkerSlot
from perdure.worker.supervise.supervisor import Supervisor

from ..plan import Fault, Plan, TaskPlan, draw
from ..world import World
from .elements import SupervisorPlan

_KEPT: list[World] = []


def play(plan: Plan, alter: Callable[[bytes], bytes] = bytes) -> World:
    """Play a plan; return its world."""
    world = World(plan)
    world.server.alter = alter
    _KEPT.append(world)
    world.play()
    return world


def kinds(plan: Plan, alter: Callable[[bytes], bytes] = bytes) -> list[str]:
    """Play a plan; return the kinds of violations in the order in which they were reported, each once."""
    return [*dict.fromkeys(violation.kind for violation in play(plan, alter).checks.violations)]


def lines_with(world: World, text: str) -> list[float]:
    """Return the times of the lines of a story that contain a text."""
    return [at for at, line in world.story if text in line]


def runs(world: World, task: str) -> list[str]:
    """Return the processes that ran a task, in order."""
    return [entry.machine for entry in world.journal.entries if (entry.what, entry.task) == ("run", task)]


def steady(name: str, at: float = 1.0, steps: int = 4, kind: str = "chain") -> TaskPlan:
    return TaskPlan(name, kind, at, steps, 0.5)


ONE: Final = SupervisorPlan(processes=1, isolated=1)
TWO: Final = SupervisorPlan(processes=2, isolated=1)

KILLED: Final = Plan(1, 1, 4.0, (steady("t0"), steady("t1")), (Fault(2.2, "kill", 0, 9.0),), slots=2, supervisors=TWO)
"""A child dies with its tasks. Its supervisor lives; the lease is longer than the run may take."""

POISONED: Final = Plan(
    1,
    1,
    4.0,
    (steady("t0", steps=3), steady("t1", 1.1, steps=6), TaskPlan("bad", "poison", 1.2, 1, 0.2)),
    (),
    slots=4,
    supervisors=TWO,
)
"""A task that kills its process runs beside others."""


# what supervisors do


def test_tasks_of_a_killed_child_continue_at_once() -> None:
    world = play(KILLED)
    assert world.checks.violations == []
    assert world.checks.supervisors.judged == 1
    again = [entry.at - world.begin for entry in world.journal.entries if entry.what == "run"][2:]
    assert again
    assert max(again) < 2.2 + 0.5


def test_a_task_that_kills_its_processes_is_quarantined_and_buried() -> None:
    world = play(POISONED)
    assert world.checks.violations == []
    assert world.checks.state("bad") == "dead"
    dead = [entry.machine for entry in world.journal.entries if entry.what == "dies"]
    assert len(dead) == 4
    assert len(world.checks.supervisors.shared["bad"]) == 2
    assert {world.checks.state(task) for task in ("t0", "t1")} == {"succeeded"}


def test_children_stop_when_their_supervisor_is_killed() -> None:
    plan = replace(KILLED, faults=(Fault(2.2, "kill supervisor", 0, 1.0),))
    world = play(plan)
    assert world.checks.violations == []
    assert len(lines_with(world, "has ended with exit code 0")) == 2
    assert {name.partition(".")[0] for name in runs(world, "t0")} == {"s0", "s1"}


def test_a_host_without_power_starts_again() -> None:
    world = play(replace(KILLED, lease=1.0, faults=(Fault(2.2, "kill host", 0, 1.0),)))
    assert world.checks.violations == []
    assert lines_with(world, "has ended with exit code 0") == []
    assert len(runs(world, "t0")) == 2


@pytest.mark.parametrize("kind", ["freeze", "block"])
def test_a_child_that_does_not_respond_is_killed_and_replaced(kind: str) -> None:
    plan = replace(KILLED, faults=(Fault(2.2, kind, 0, 60.0),), supervisors=replace(ONE, stall_limit=2.0))
    world = play(plan)
    assert world.checks.violations == []
    assert len(runs(world, "t0")) == 2
    assert len([entry for entry in world.journal.entries if entry.what == "result"]) == 2


def test_a_supervisor_that_gets_sigterm_stops_its_children() -> None:
    plan = replace(KILLED, faults=(Fault(2.2, "stop supervisor", 0, 0.0),))
    world = play(plan)
    assert world.checks.violations == []
    [ended] = lines_with(world, "supervisor s0 has ended with exit code 0")
    assert 2.2 < ended < 4.5


def test_a_reload_replaces_all_children() -> None:
    plan = replace(KILLED, faults=(Fault(2.2, "reload", 0, 0.0),))
    world = play(plan)
    assert world.checks.violations == []
    assert len(lines_with(world, "has ended with exit code 0")) == 2
    assert len(lines_with(world, "starts as spare")) >= 2


def test_a_pause_that_an_operator_lifts() -> None:
    kills = tuple(Fault(1.0 + 1.5 * number, "kill", 0, 9.0) for number in range(3))
    plan = replace(KILLED, tasks=(steady("t0", 6.0),), faults=kills, supervisors=replace(ONE, crash_threshold=1))
    world = play(plan)
    assert world.checks.violations == []
    assert lines_with(world, "is paused")
    assert lines_with(world, "is resumed")


def test_a_supervisor_that_waits_for_a_lost_reply_is_not_judged() -> None:
    world = play(replace(KILLED, faults=(Fault(2.0, "deaf", 1, 0.0), *KILLED.faults)))
    assert world.hosts[0].machine in [line.machine for line in world.network.connections if line.on_close]
    assert world.checks.violations == []
    assert (world.checks.supervisors.judged, world.checks.supervisors.judged_hosts) == (0, 0)


def test_a_supervisor_is_not_judged_while_a_child_of_it_is_frozen() -> None:
    """The child is frozen while it starts: one that has started is killed and replaced."""
    world = play(replace(KILLED, workers=2, faults=(Fault(0.2, "freeze", 0, 9.0, "XAUTOCLAIM"),)))
    assert world.checks.violations == []
    assert world.checks.supervisors.judged_hosts == 1


@pytest.mark.parametrize("seed", range(3))
def test_no_guarantee_is_violated_with_supervisors(seed: int) -> None:
    assert kinds(draw(seed, "supervised hosts")) == []


# checks that fail


def test_a_crash_that_is_not_reported_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report_nothing(registry: SupervisorRegistry, child: Child) -> CrashReport:
        return CrashReport(0)

    monkeypatch.setattr(SupervisorRegistry, "report", report_nothing)
    assert kinds(KILLED) == ["not released"]


def test_released_tasks_that_no_worker_claims_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def claim_nothing(*args: Any) -> tuple[str, list[Any]]:
        return "0-0", []

    monkeypatch.setattr(Consumer, "claim", claim_nothing)
    assert kinds(KILLED)[0] == "not continued"


def test_a_worker_that_waits_for_a_lost_reply_is_not_expected_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    async def claim_nothing(*args: Any) -> tuple[str, list[Any]]:
        return "0-0", []

    def is_judged(target: int, *faults: Fault) -> bool:
        kill = Fault(6.0, "kill", target, 9.0)
        world = play(replace(KILLED, lease=1.0, tasks=(steady("t0", steps=14),), faults=(*faults, kill)))
        return "not continued" in {violation.kind for violation in world.checks.violations}

    monkeypatch.setattr(Consumer, "claim", claim_nothing)
    target = next(target for target in range(3) if is_judged(target))  # the worker that runs the task
    judged = [is_judged(target, Fault(2.0, "deaf", connection, 0.0)) for connection in range(2, 8)]
    assert set(judged) == {True, False}  # connections of the killed worker, and of the other one


def test_a_task_that_kills_more_than_two_shared_processes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (crash_limit, quarantine_gate):
        monkeypatch.setattr(module, "must_quarantine", lambda *crashes: False)
    assert "poison" in kinds(POISONED)


def test_an_innocent_task_that_is_buried_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without quarantine, a task dies as often as the poisonous one beside it."""
    for module in (crash_limit, quarantine_gate):
        monkeypatch.setattr(module, "must_quarantine", lambda *crashes: False)
    plan = replace(POISONED, supervisors=ONE, tasks=(TaskPlan("t0", "chain", 1.0, 1, 3.0), *POISONED.tasks[2:]))
    assert kinds(plan) == ["poison", "wrong outcome"]


def test_a_crash_that_counts_despite_progress_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "counts_as_crash", property(lambda child: child.crashed and child.role == "worker"))
    assert kinds(KILLED) == ["counted crash"]


def test_children_that_outlive_a_drain_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave_them(supervisor: Supervisor) -> bool:
        for child in supervisor._children:
            child.handled.set()
        supervisor._background.cancel_scope.cancel()
        return True

    monkeypatch.setattr(Supervisor, "_drain", leave_them)
    monkeypatch.setattr(Supervisor, "stop", lambda supervisor: supervisor._stopping.set())
    assert "not drained" in kinds(replace(KILLED, faults=(Fault(2.2, "stop supervisor", 0, 0.0),)))


def find_none(monitor: StallMonitor, now: float) -> list[Child]:
    return []


@pytest.mark.parametrize("kind", ["freeze", "block"])
def test_a_child_that_does_not_respond_and_is_not_killed_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallMonitor, "find_stalled", find_none)
    assert kinds(replace(KILLED, faults=(Fault(2.2, kind, 0, 8.0),))) == ["not killed"]


def test_children_that_outlive_their_supervisor_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SupervisedWorker, "_on_supervisor_gone", lambda worker: None)
    tasks = (*KILLED.tasks, TaskPlan("t2", "chain", 1.0, 30, 0.5))
    plan = replace(KILLED, tasks=tasks, faults=(Fault(2.2, "kill supervisor", 0, 1.0),))
    assert kinds(plan) == ["orphan"]


def test_a_supervisor_that_kills_a_child_which_responds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = Fault(2.2, "freeze supervisor", 0, 7.0)
    plan = replace(KILLED, tasks=(steady("t0", steps=10),), faults=(frozen,))
    assert kinds(plan) == []
    update = Child._update

    def without_heartbeats(child: Child, kind: str, message: dict[str, Any]) -> None:
        if kind != "alive":
            update(child, kind, message)

    monkeypatch.setattr(Child, "_update", without_heartbeats)
    assert "needless kill" in kinds(replace(plan, faults=()))


def test_a_child_that_is_not_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(KILLED, tasks=(steady("t0", steps=12),))
    assert kinds(plan) == []
    assert _KEPT[-1].checks.supervisors.judged_hosts == 1
    run = WorkerSlot.run

    async def run_once(slot: WorkerSlot) -> None:
        with anyio.move_on_after(2.5):
            await run(slot)
        await anyio.sleep_forever()

    monkeypatch.setattr(WorkerSlot, "run", run_once)
    assert kinds(replace(plan, faults=(Fault(3.5, "kill", 0, 0.0),))) == ["children"]
